"""grad_filter.py without any of the files beside it."""

from __future__ import annotations

import importlib
import shutil

import pytest
import torch

from library import grad_filter
from tests.conftest import REPOSITORY

CHAINS = ["topk keep=0.1", "topk keep=0.2 scope=row policy=update", "ema,topk_change ema.beta=0.8", "finite nan=zero"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    package = folder / "only_the_filter"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(REPOSITORY / "library" / "grad_filter.py", package)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("only_the_filter.grad_filter")


def run(module, text: str, resume_at: int = -1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.ones(300, 300))
    optimizer = torch.optim.AdamW([param], lr=0.01)
    module.attach(optimizer, text)
    for step in range(5):
        if step == resume_at:
            saved, optimizer = optimizer.state_dict(), torch.optim.AdamW([param], lr=0.01)
            module.attach(optimizer, text)
            optimizer.load_state_dict(saved)
        param.grad = torch.randn(300, 300, generator=generator)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("text", CHAINS)
def test_the_single_file_filters_and_resumes_to_the_same_bits(text, alone):
    expected = run(grad_filter, text)
    assert torch.equal(run(alone, text), expected)
    assert torch.equal(run(alone, text, resume_at=3), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk scope=global", "needs grad_filter_scopes.py beside"),
        ("own.py:Mine", "needs grad_filter_custom.py beside"),
        ("topk policy=freeze", "policy must be update or zero"),
        ("snr", "no filter is called 'snr'"),
    ],
)
def test_what_the_single_file_lacks_is_named(text, message, alone):
    with pytest.raises(alone.GradFilterError, match=message):
        alone.attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(100))]), text)
