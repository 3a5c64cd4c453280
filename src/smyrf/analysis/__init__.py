"""How good an approximation is: attention's inputs taken from real models, and errors on them."""
