"""The first try: `python -m nanopaged "prompt"`, the version, and what an engine says
of itself.

The command prints what the model says and nothing else on stdout; a wrong call ends
with a sentence on stderr and a status that is not zero, without a traceback.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments)`: the command within this process, since its imports take
    seconds.
    """

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["nanopaged", *map(str, arguments)])
        monkeypatch.setattr(
            "builtins.input", lambda *_: pytest.fail("it asks on stdin")
        )
        status = 0
        try:
            runpy.run_module("nanopaged", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
            if isinstance(
                status, str
            ):  # a sentence, which the interpreter prints to stderr
                print(status, file=sys.stderr)
                status = 1
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return call


@pytest.fixture(scope="module")
def parrot(make_scripted_model, tokenizer):
    """A model that can only go on with "the block table"."""
    return make_scripted_model(
        tokenizer.encode("the block table ", add_special_tokens=False)
    )


def test_a_prompt_and_a_model_give_what_the_model_says(run, parrot):
    result = run("the block", "--model", parrot)
    assert result.returncode == 0, result.stderr
    assert " table the block table the" in result.stdout
    assert run("--model", parrot, "the block").stdout == result.stdout


def test_chat_wraps_the_prompt_in_the_models_template(run, parrot, monkeypatch):
    from nanopaged import LLM

    asked = []
    method = LLM.chat

    def chat(self, messages, *args, **options):
        asked.append(messages)
        return method(self, messages, *args, **options)

    monkeypatch.setattr(LLM, "chat", chat)
    result = run("What is a block?", "--chat", "--model", parrot)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert asked == [[{"role": "user", "content": "What is a block?"}]]


def test_a_wrong_call_ends_with_a_sentence(run, tmp_path):
    result = run("hello", "--model", tmp_path / "nowhere")
    assert result.returncode != 0
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_chat_without_a_template_is_refused_in_a_sentence(run, llama):
    result = run("hello", "--chat", "--model", llama)
    assert result.returncode != 0
    assert "chat template" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_the_options(run):
    result = run("--help")
    assert result.returncode == 0
    for word in ("prompt", "--model", "--chat"):
        assert word in result.stdout
    missing = run()
    assert missing.returncode == 2
    assert "prompt" in missing.stderr


@pytest.mark.slow
def test_the_bundled_model_answers_without_any_option():
    """As a user calls it: from another folder, without network, stdin closed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", "nanopaged", "ROMEO:"],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        cwd=Path(sys.executable).parent,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20
    assert "Traceback" not in result.stderr


def test_the_version_is_the_packages():
    import nanopaged

    project = (ROOT / "pyproject.toml").read_text()
    stated = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+([abc.]\w+)?", nanopaged.__version__)
    if stated:
        assert nanopaged.__version__ == stated[1]
    else:
        assert 'dynamic = ["version"]' in project


def test_the_package_index_is_told_where_things_are():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^\[project\.urls\]\n\w+ = \"https://", project, re.MULTILINE)
    assert '"Programming Language :: Python :: 3"' in project
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"!\[[^]]*\]\(([^)\s]+)", readme) + re.findall(
        r'src="([^"]+)"', readme
    )
    relative = [target for target in targets if not target.startswith("https://")]
    assert not relative, f"pictures that the package index does not show: {relative}"


def test_an_engine_says_what_it_is(llama, engine):
    llm = engine(llama)
    text = repr(llm)
    assert text.startswith("LLM(") and text.endswith(")")
    assert "\n" not in text and len(text) < 500
    for word in (llama.name, "float32", "cpu", "64"):
        assert word in text
    llm.shutdown()
    assert "shut down" in repr(llm)
