"""Which method and size where: chosen once for a model (`tune`), or all along a training run (`AdaptiveSchedule`)."""
