"""A first try: python -m nanopaged "Once upon a time" [--model DIRECTORY_OR_ID]"""

import argparse
import sys

from nanopaged import LLM, __version__


def main() -> None:
    parser = argparse.ArgumentParser(
        "nanopaged", description="Continue a prompt, or answer it.")
    parser.add_argument("prompt", help="the text to continue")
    parser.add_argument("--model", help="a directory or a hub id; else the bundled one")
    parser.add_argument("--chat", action="store_true", help="answer, by chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args()

    with LLM(options.model) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = options.max_tokens
        if options.chat:
            messages = [{"role": "user", "content": options.prompt}]
            outputs = llm.chat(messages, params, use_tqdm=False)
        else:
            outputs = llm.generate(options.prompt, params, use_tqdm=False)
    print(outputs[0].outputs[0].text)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"nanopaged: {error}")
