"""The native backend: C++ for CPUs (`csrc/`)."""
