"""Are peaks known for exactly the devices that the table names?"""

from __future__ import annotations

from lightning_megatron.accounting.devices import peak_flops_per_s


def test_known_devices_have_the_datasheets_dense_peaks() -> None:
    assert peak_flops_per_s("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops_per_s("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops_per_s("NVIDIA L40S", "fp16") == 362e12


def test_an_unknown_device_has_no_peak() -> None:
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H300", "cpu", "", "nvidia h200"):
        assert peak_flops_per_s(name, "bf16") is None


def test_a_precision_that_a_device_lacks_has_no_peak() -> None:
    assert peak_flops_per_s("Tesla T4", "bf16") is None
    assert peak_flops_per_s("Tesla T4", "fp16") == 65e12
