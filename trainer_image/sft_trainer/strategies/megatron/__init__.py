"""The strategy on layers of Megatron-Core."""
