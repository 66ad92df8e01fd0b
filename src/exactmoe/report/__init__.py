"""What people decide by: whether a model fits, where its routes go, what two machines agree on."""
