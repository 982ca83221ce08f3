"""What tests of this folder share: an engine on the GPU, and its memory given back."""

import gc

import pytest
import torch


def give_back():
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def release():
    """`release()`: give memory that nobody holds back to the device."""
    return give_back


@pytest.fixture
def on_gpu(engine):
    """`on_gpu(path, steps_ahead=1, **options)`: like `engine`, but on the GPU."""

    def make(path, steps_ahead=1, **options):
        llm = engine(path, device="cuda", **options)
        llm.steps_ahead = steps_ahead
        return llm

    yield make
    give_back()
