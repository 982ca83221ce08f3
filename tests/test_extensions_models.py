"""Four of the extensions that people write first, each in a copy of the package.

Decoders of transformers, a mixture of experts, a server, and Ray on two nodes. The
patches are in solutions/, and what proves them right are the scripts in its checks/.
"""

import pytest

from helpers import SOLUTIONS, apply_patch, copy_package, run_python
from test_ranks import TORCHRUN


@pytest.fixture
def check(tmp_path):
    """`check(patch, name, ..)`: apply a patch of solutions/ to a copy of the package,
    and run checks/name.py with it.
    """

    def run(patch, name, *arguments, python=()):
        copy_package(tmp_path)
        if patch:
            apply_patch(patch, tmp_path)
        script = SOLUTIONS / "checks" / f"{name}.py"
        said = run_python(*python, script, *arguments, cwd=tmp_path, timeout=300,
                          PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
        assert f"{name}: ok" in said

    return run


def test_a_decoder_of_transformers_gives_the_same_tokens(check):
    check("any_decoder", "any_decoder", "granite")


@pytest.mark.slow
def test_decoders_of_transformers_give_the_same_tokens_or_are_refused(check):
    check("any_decoder", "any_decoder")


@pytest.mark.slow
def test_a_mixture_of_experts_gives_the_same_tokens_for_all_kinds_of_routing(check):
    check("moe", "moe")


@pytest.mark.slow
def test_ranks_share_every_expert(check):
    check("moe", "moe", "1", python=[*TORCHRUN, "2"])


def test_a_server_serves_eight_clients_and_survives_those_that_go_away(check):
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    check(None, "server")


@pytest.mark.slow
def test_ray_answers_every_prompt_once_even_if_an_engine_is_killed(check):
    pytest.importorskip("ray.data", reason="pip install 'ray[data]'")
    check(None, "ray_batch")
