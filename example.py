"""Answer a few prompts, word by word, then show what the KV cache did.

    python example.py                                 # the bundled model, offline
    python example.py --model Qwen/Qwen3-0.6B --chat  # from the Hugging Face hub
    python example.py --trace run.html                # a page that shows every step

With --trace the pool is small, so that one sees requests give way to each other.
"""

from __future__ import annotations  # `nanopaged.LLM` would import torch

import argparse
import logging
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import nanopaged
from nanopaged import SamplingParams
from nanopaged.tour import trace

PLAYS = ["ROMEO:\n", "JULIET:\nO ", "KING RICHARD III:\nA horse, a horse"]
QUESTIONS = ["Explain paged attention in two sentences.", "Write a haiku about memory."]
RULE = f"\n\n{'-' * 70}\n"


def main() -> None:
    args = parse_arguments()
    # The engine's own messages only, because other libraries print theirs themselves.
    logger = logging.getLogger("nanopaged")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stderr))
    # It would repeat for each try that the hub cannot be reached. We say so once.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    sys.stdout.reconfigure(errors="replace")  # "?" for what the terminal cannot show

    print("Loading the model ...", file=sys.stderr, flush=True)
    if args.model and not os.path.exists(args.model):
        print("(from the Hugging Face hub. Without a network, this gives up after half "
              "a minute)", file=sys.stderr, flush=True)
    if args.chat and not args.model:
        print("The bundled model has only read Shakespeare. For answers, add "
              "--model Qwen/Qwen3-0.6B", file=sys.stderr)
    if will_compile():
        print("Compiling the CPU's loops, in about ten seconds. They are kept.",
              file=sys.stderr, flush=True)
    llm = nanopaged.LLM(args.model, seed=args.seed, num_blocks=args.num_blocks)
    warm_up(llm)
    prompts = args.prompts or (QUESTIONS if args.chat else PLAYS)
    with trace(llm, args.trace) if args.trace else nullcontext():
        if args.chat:
            chat(llm, prompts, args.params)
        else:
            outputs = stream(llm, prompts, args.params)
            show_prefix_cache(llm, outputs)
            show_pool(llm, prompts, args.params)
    llm.shutdown()
    if args.trace:
        print(f"Every step of this run is in {args.trace}: open it in a browser.")
    else:
        print("Next: --trace run.html shows every step of this run, and\n"
              "python -m nanopaged.tour explains what one sees.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prompts", nargs="*", type=utf8, metavar="PROMPT",
        help="default: a few that suit the model")
    parser.add_argument(
        "--model", help="a directory, or an id on the hub; default: the bundled model")
    parser.add_argument("--chat", action="store_true", help="use the chat template")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--num-blocks", type=int, help="the pool; by default a large one, or 24 blocks "
        "with --trace")
    parser.add_argument("--trace", metavar="FILE", help="a page that shows every step")
    args = parser.parse_args()
    try:
        args.params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens)
        if args.trace:
            from nanopaged.tour.page import check_writable

            check_writable(args.trace)
            args.num_blocks = args.num_blocks or (None if args.model else 24)
    except ValueError as error:
        parser.error(str(error))
    return args


def utf8(argument: str) -> str:
    """Read an argument as UTF-8, even if the locale is ASCII.

    Python then hides each undecodable byte in a "surrogate" character.
    """
    return argument.encode("utf-8", "surrogateescape").decode("utf-8")


def will_compile() -> bool:
    """Whether a CPU computes, and Numba has kept no compiled loops of this version."""
    try:
        import torch  # not before something is printed: it takes seconds

        from nanopaged.cpu import kernels, threads

        loop = threads.loop(kernels.store, parallel=False)
        name = f"*.{loop.py_func.__qualname__}-*.nbi"
        kept = Path(loop.stats.cache_path or "").glob(name)
    except (ImportError, AttributeError):  # without Numba, or with it disabled
        return False
    return not torch.cuda.is_available() and not any(kept)


def warm_up(llm: nanopaged.LLM) -> None:
    """Compute a long prompt and a token, so that what is timed later compiles nothing
    and finds its memory there.
    """
    length = min(512, llm.engine.max_model_len - 3)
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([[0] * length], params, use_tqdm=False)
    llm.reset_prefix_cache()


def chat(
    llm: nanopaged.LLM, questions: list[str], params: SamplingParams
) -> None:
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, params)
    for question, output in zip(questions, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text}")


def stream(
    llm: nanopaged.LLM, prompts: list[str], params: SamplingParams
) -> list[nanopaged.RequestOutput]:
    """Answer all prompts in one batch, and print the first answer as it grows."""
    growing = llm.stream(prompts, params)  # this checks them; no step runs yet
    print(prompts[0], end="", flush=True)
    latest: dict[int, nanopaged.RequestOutput] = {}
    num_shown = 0
    started = time.perf_counter()
    for output in growing:
        latest[int(output.request_id)] = output
        text = latest[min(latest)].outputs[0].text
        print(text[num_shown:], end="", flush=True)
        num_shown = len(text)
    seconds = time.perf_counter() - started

    outputs = [latest[request_id] for request_id in sorted(latest)]
    for output in outputs[1:]:
        print(f"{RULE}{output.prompt}{output.outputs[0].text}", end="")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{RULE}{len(prompts)} requests, {num_tokens} tokens in {seconds:.2f} s")
    return outputs


def show_prefix_cache(
    llm: nanopaged.LLM, outputs: list[nanopaged.RequestOutput]
) -> None:
    """Send a long prompt twice. The second time, its blocks are in the cache."""
    text = "".join(f"{output.prompt}{output.outputs[0].text}" for output in outputs)
    token_ids = llm.tokenizer(text).input_ids[: llm.engine.max_model_len - 2]
    one_token = SamplingParams(temperature=0, max_tokens=1)
    for attempt in ("first", "second"):
        started = time.perf_counter()
        (output,) = llm.generate([token_ids], one_token, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(
            f"The text above as a prompt of {len(token_ids)} tokens, for the {attempt} "
            f"time: {output.num_cached_tokens} of them\nare in the cache already, and "
            f"the first new token takes {1000 * seconds:.1f} ms."
        )


def show_pool(
    llm: nanopaged.LLM, prompts: list[str], params: SamplingParams
) -> None:
    """Ask for two answers to each prompt, stop halfway, and look at the pool of blocks.
    """
    try:
        for prompt in prompts:
            llm.add_request(prompt, replace(params, n=2))
    except ValueError:
        print("The pool is too small for two answers to a prompt at once.")
        return
    for _ in range(20):
        llm.step()

    stats = llm.stats()
    width = -(-60 * stats.blocks_used // stats.blocks_total)
    print(
        f"20 steps into two answers to each prompt: {stats.blocks_used} of "
        f"{stats.blocks_total} blocks are in use,\nand {stats.blocks_cached} are in "
        f"the prefix cache, which has saved {stats.prefix_hit_tokens} prompt tokens."
        f"\n[{'#' * width:.<60}] the pool"
    )


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whatever reads our output, such as `head`, has seen enough. Python flushes
        # stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit("\nexample.py: interrupted")
    except (OSError, ValueError) as error:  # the model or a prompt is refused
        sys.exit(f"example.py: {error}")
