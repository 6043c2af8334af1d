"""KL estimates against exact expectations and definitions."""

from __future__ import annotations

import pytest
import torch

from streamrl.algorithms.kl import k1, k2, k3


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    """Exact expectation over a categorical distribution instead of samples."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    kl = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * k1(p, q)).sum()) == pytest.approx(kl)
    assert float((p.exp() * k3(p, q)).sum()) == pytest.approx(kl)
    assert (k3(p, q) >= 0).all()
    near = (p + 1e-3 * q).log_softmax(0)
    assert float((p.exp() * k2(p, near)).sum()) == pytest.approx(float((p.exp() * (p - near)).sum()), rel=1e-2)


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    [exact] = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    [found] = torch.autograd.grad((p.detach().exp() * k2(p, q)).sum(), logits)
    torch.testing.assert_close(found, exact)
