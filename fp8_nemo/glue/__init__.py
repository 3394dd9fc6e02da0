"""The small module: quantize, refit, prove, recalibrate, with torch alone (README.md).

- `quantize`: `quantize_blocks`, `quantize_list`, `dequantize_blocks` for weights,
  `quantize_groups`, `dequantize_groups` for activations, `quantize_tensor` for Q, K and V
- `refit`: `refit_stream`, everything that one refit sends; `encode`, one group of it
- `ledger`: `Ledger`, by which a receiver proves a refit or names what failed
- `destination`: `Destination`, the receiver's tensors that a refit fills
- `digest`: a number for a tensor's bytes, over parts of it too
- `manifest`: the first and the last tensor of a stream
- `recalibrate`: `AmaxObserver`, `kv_scales`, `check_scales`
- `wire`: names, types and shapes, free of torch; `FAMILIES` of models
- `kernels`: the same on a CUDA device, called by the others
"""
