"""The operators of ``fla_npu``; ``ascendc`` has them."""
