"""Dense bf16 peak of a device, for model FLOP utilisation."""

import torch

# TFLOP/s without sparsity, from the vendors' data sheets of the SXM parts where there are several.
_DENSE_BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a CUDA device by its name; None for a CPU or a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in _DENSE_BF16_TFLOPS if key in name]
    return _DENSE_BF16_TFLOPS[max(matches, key=len)] * 1e12 if matches else None
