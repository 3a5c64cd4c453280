"""The paper's experiments: language (`nlp`), images (`biggan`) and theory (`theory`)."""
