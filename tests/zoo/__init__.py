"""docs/coverage.md, made by running: what replacing attention does with many architectures."""
