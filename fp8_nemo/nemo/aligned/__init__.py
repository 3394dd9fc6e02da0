"""vLLM's RoPE, SiLU and FP8 quantizer by the trainer's formulas (`precision.align=cheap`)."""
