"""Operations of the residual strategies: tensors in, tensors out; `reference` defines each one."""
