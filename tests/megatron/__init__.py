"""The strategy on Megatron-Core, on a CPU: ``make parity-megatron``."""
