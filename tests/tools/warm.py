"""A Python that has imported torch, transformers and Hypothesis, and forks for each
script: most of the seconds that a fresh one takes are imports.

It reads lines of JSON, each with scripts that run at once, and answers with their worst
exit code. Whatever a script imports or breaks ends with its process. Nothing of this
project is imported here, nor Numba, which looks at the environment then. (So does
Triton, which torch brings along: it runs in its interpreter.)
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager


@contextmanager
def start(log):
    """A function that runs Python with these arguments, and returns its exit code and
    its output. It imports the package of `cwd`, unless PYTHONPATH names another. With
    `ranks`, so many run at once, as under torchrun. A variable given as None is unset.
    """
    fresh = os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    fresh.pop("PYTHONPATH", None)
    with subprocess.Popen([sys.executable, __file__], env=fresh, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:

        def run_there(*arguments, cwd, ranks=1, **env):
            log.write_text("")
            env = fresh | {"PYTHONPATH": str(cwd)} | env
            env = {name: value for name, value in env.items() if value is not None}
            if ranks > 1:
                from torch.distributed import TCPStore

                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}
            jobs = [[[*map(str, arguments)], str(cwd), env | {"RANK": str(rank)},
                     str(log)] for rank in range(ranks)]
            if not hasattr(os, "fork"):  # on Windows, each is a fresh Python
                with log.open("w") as file:
                    processes = [subprocess.Popen(
                        [sys.executable, *words], cwd=cwd, env=env, stdout=file,
                        stderr=file) for words, cwd, env, _ in jobs]
                statuses = [process.wait(900) for process in processes]
                return max(map(abs, statuses)), log.read_text("utf-8")
            server.stdin.write(json.dumps(jobs) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline()), log.read_text("utf-8")

        yield run_there
        server.kill()


def run(arguments, cwd, env, log):
    """As `python arguments` does, in this process."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    signal.alarm(900)  # it does not hang for good
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), descriptor)
    kind, *sys.argv = arguments if arguments[0] in ("-c", "-m") else ["", *arguments]
    sys.path[:1] = ["" if kind else os.path.dirname(sys.argv[0]),
                    *env["PYTHONPATH"].split(os.pathsep)]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork(job):
    """Run a script in a process of its own; returns its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        run(*job)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            status = int(end.code or 0)
        else:
            sys.stdout.flush()
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()  # it would look for garbage in a fifth of the time, and find none
    import hypothesis.strategies  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
    gc.enable()
    gc.freeze()

    for line in sys.stdin:
        children = [fork(job) for job in json.loads(line)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        print(max(map(abs, map(os.waitstatus_to_exitcode, statuses))), flush=True)
