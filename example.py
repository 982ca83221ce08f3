"""Stream a few prompts side by side, then look at what the cache did.

    python example.py                                  # the bundled model, offline
    python example.py --model Qwen/Qwen3-0.6B --chat   # a hub id or a directory
"""

import argparse
import logging
import sys
import time

from nanopaged import LLM, SamplingParams

PLAYS = ["ROMEO:\n", "JULIET:\nO ", "KING RICHARD III:\nA horse, a horse"]
QUESTIONS = ["Explain paged attention in two sentences.", "Write a haiku about memory."]


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("prompts", nargs="*", help="default: a few that suit the model")
    parser.add_argument("--model", help="directory or hub id (default: bundled)")
    parser.add_argument("--chat", action="store_true", help="use the chat template")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    llm = LLM(args.model, seed=args.seed)
    prompts = args.prompts or (QUESTIONS if args.chat else PLAYS)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    if args.chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        for prompt, output in zip(prompts, llm.chat(chats, params), strict=True):
            print(f"\n> {prompt}\n{output.outputs[0].text}")
        return

    # All prompts run in one batch; the first is printed while its tokens come.
    print(prompts[0], end="", flush=True)
    shown, started, latest = 0, time.perf_counter(), {}
    for output in llm.stream(prompts, params):
        latest[output.request_id] = output
        first = latest[min(latest, key=int)].outputs[0].text
        print(first[shown:], end="", flush=True)
        shown = len(first)
    seconds = time.perf_counter() - started
    others = sorted(latest, key=int)[1:]
    for output in [latest[key] for key in others]:
        text = output.outputs[0].text
        print(f"\n\n{'-' * 70}\n{output.prompt}{text}", end="")
    tokens = sum(len(output.outputs[0].token_ids) for output in latest.values())
    print(f"\n\n{'-' * 70}")
    print(f"{len(prompts)} requests, {tokens} tokens in {seconds:.2f} s")

    # A long prompt twice: the second time its K and V are found, block by block.
    texts = [output.prompt + output.outputs[0].text for output in latest.values()]
    long_prompt = "".join(texts)
    ids = llm.tokenizer(long_prompt).input_ids[: llm.runner.max_model_len - 2]
    one_token = SamplingParams(temperature=0, max_tokens=1)
    for attempt in ("first", "second"):
        (output,) = llm.generate([ids], one_token, use_tqdm=False)
        seconds = output.metrics.first_token_time - output.metrics.arrival_time
        print(f"{len(ids)} prompt tokens for the {attempt} time: "
              f"{output.num_cached_tokens} cached, "
              f"{1000 * seconds:.1f} ms to the first token")

    # The pool in use.
    for prompt in prompts:
        llm.add_request(prompt, params)
    for _ in range(20):
        llm.step()
    stats = llm.stats()
    print(f"20 steps into the same prompts again: {stats.blocks_used} of "
          f"{stats.blocks_total} blocks used, "
          f"{stats.kv_utilisation:.0%} of their slots hold a token; "
          f"{stats.blocks_cached} blocks cached, {stats.prefix_hit_tokens} of "
          f"{stats.prefix_query_tokens} prompt tokens found in them")
    llm.shutdown()


if __name__ == "__main__":
    main()
