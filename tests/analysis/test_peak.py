import pytest
import torch

from lit_msar.analysis.peak import peak_flops


def test_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GB200", 2500),
        ("Toy", None),
    ],
)
def test_peak_is_the_dense_one_of_the_longest_matching_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
