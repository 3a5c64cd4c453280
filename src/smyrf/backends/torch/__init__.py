"""The torch backend: PyTorch's operators, on any device."""
