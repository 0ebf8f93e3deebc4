"""Libraries of Hopper GPUs bound as operators: DeepGEMM, cuBLASLt, FlashAttention-3. None is loaded by this import."""
