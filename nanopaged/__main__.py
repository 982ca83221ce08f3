"""nanopaged: an engine that serves language models, written to be read.

    python example.py                 answers a few prompts; --chat, --trace run.html
    python -m nanopaged.tour          writes the guided tour; --serve takes your prompts
    python bench.py                   measures how fast it is on this machine
    python tests/solutions/server.py  an OpenAI-compatible server, at port 8000
    python -m pytest                  the tests; .[test] installs what they need

Run these where you have cloned the repository. --help says more about each of them.
README.md has the map: where to begin reading, and in which order to go on.
"""

print(__doc__.rstrip())
