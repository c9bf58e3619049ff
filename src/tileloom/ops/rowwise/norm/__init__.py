"""What `rms_norm` and `layer_norm` share: kernels, problem, rule and plans; no operator itself."""
