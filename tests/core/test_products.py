import os

import pytest
import torch

from loopwm import runtime as products
from loopwm.runtime import attention_products, quick_products


@pytest.mark.parametrize("vectors", [1, 64])
def test_quick_products_are_those_of_float32_and_leave_the_setting_as_it_was(vectors):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(vectors, 512, generator=generator), torch.randn(256, 512, generator=generator)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with quick_products(vectors):
        found = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(found.double(), x.double() @ w.double().T, atol=1e-3, rtol=1e-5)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_processors_with_matrix_units_keep_the_library_that_rounds_nothing(monkeypatch):
    """There, what makes torch ask the other library would also round to bfloat16."""
    for text, quicker in (("AuthenticAMD avx512f", True), ("AuthenticAMD amx_bf16", False), ("GenuineIntel", False)):
        monkeypatch.setattr(products.Path, "exists", lambda self: True)
        monkeypatch.setattr(products.Path, "read_text", lambda self, text=text: text)
        products._onednn_is_quicker.cache_clear()
        assert products._onednn_is_quicker() == quicker
    products._onednn_is_quicker.cache_clear()


def test_attention_leaves_the_quick_products_unless_it_is_long(monkeypatch):
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    monkeypatch.setattr(products, "_onednn_is_quicker", lambda: True)
    with quick_products():
        quick = matmul.fp32_precision
        with attention_products(products.LONG - 1):
            assert matmul.fp32_precision == "none"
        with attention_products(products.LONG):
            assert matmul.fp32_precision == quick != "none"
        assert matmul.fp32_precision == quick
    assert matmul.fp32_precision == before


@pytest.mark.parametrize(("given", "capacity"), [(None, "16384"), ("9", "9")])
def test_training_keeps_products_of_many_shapes(monkeypatch, given, capacity):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(products, "_set", lambda parameters: None)  # the allocator is the whole process's
    products.keep_everything()
    assert os.environ[name] == capacity
