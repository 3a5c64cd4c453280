"""The paper's language experiments: fine-tuning with another attention."""
