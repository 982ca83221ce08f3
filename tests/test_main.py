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
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import nanopaged

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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The unpacked source distribution, the names in the wheel, and its metadata."""
    directory = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", directory],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        archive.extractall(directory)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(n for n in names if n.endswith("/METADATA")))
    source = next(path for path in directory.iterdir() if path.is_dir())
    return source, names, metadata.decode()


def test_the_version_is_the_packages(built):
    assert re.fullmatch(r"\d+\.\d+\.\d+([abc.]\w+)?", nanopaged.__version__)
    assert f"\nVersion: {nanopaged.__version__}\n" in built[2]


def test_the_package_index_shows_links_and_pictures(built):
    metadata = built[2]
    assert "\nProject-URL: Homepage, https://" in metadata
    assert "\nClassifier: Programming Language :: Python :: 3\n" in metadata
    targets = re.findall(r"\]\(([^)\s]+)", metadata)
    targets += re.findall(r'src(?:set)?="([^"]+)"', metadata)
    assert len(targets) > 3
    broken = [target for target in targets if not target.startswith(("https://", "#"))]
    assert not broken, "the index has no such file"


def test_the_wheel_has_all_that_the_package_reads(built):
    kept = [path for path in (ROOT / "nanopaged").rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in kept if path.suffix != ".pyc"}
    names = {name for name in names if "__pycache__" not in name}
    assert names <= set(built[1])
    assert not any(name.startswith("tests/") for name in built[1])


@pytest.mark.slow
def test_the_source_distribution_passes_tests_of_its_own(built):
    source = built[0]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/test_detokenizer.py"],
        cwd=source,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    assert result.returncode == 0, result.stdout
    kept = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert kept <= {path.name for path in (source / "tests").rglob("*.py")}


def test_an_engine_says_what_it_is(llama, engine):
    llm = engine(llama)
    text = repr(llm)
    assert text.startswith("LLM(") and text.endswith(")")
    assert "\n" not in text and len(text) < 500
    for word in (llama.name, "float32", "cpu", "64"):
        assert word in text
    llm.shutdown()
    assert "shut down" in repr(llm)
