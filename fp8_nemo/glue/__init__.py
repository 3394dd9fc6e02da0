"""The small module: quantize, recalibrate, refit, prove."""
