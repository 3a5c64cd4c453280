"""Which method and size where: chosen once for a model (`tune`), or during training (`AdaptiveSchedule`)."""
