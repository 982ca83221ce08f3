"""Answers that keep to a JSON schema, a regular expression, choices or a grammar: a
logits processor, by xgrammar. server.py and as_vllm.py use it.
"""

import json


class Grammars:
    """What a model's tokens may spell. The compiler keeps what it has compiled."""

    def __init__(self, llm):
        try:
            import xgrammar
        except ImportError as error:
            raise ImportError("structured answers need xgrammar: "
                              "pip install xgrammar") from error
        self.xgrammar, self.vocab_size = xgrammar, llm.model_config.vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(
            llm.get_tokenizer(), vocab_size=self.vocab_size,
            stop_token_ids=llm.eos_token_ids)
        self.compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=2**28)

    def compile(self, kind, value):
        """kind: "json" for a schema, "regex", "choice" for a list, or "grammar"."""
        if kind == "json":
            schema = value if isinstance(value, str) else json.dumps(value)
            # With any whitespace, a small model might never stop writing spaces.
            return self.compiler.compile_json_schema(schema, any_whitespace=False)
        if kind == "regex":
            return self.compiler.compile_regex(value)
        if kind == "choice":
            value = "root ::= " + " | ".join(
                json.dumps(text, ensure_ascii=False) for text in value)
        return self.compiler.compile_grammar(value)

    def processor(self, kind, value, name):
        """A logits processor for one request, which lets only tokens pass that lead to
        such an answer. ValueError says what is wrong with the value called `name`.
        """
        xgrammar, num_prompt_tokens = self.xgrammar, None
        try:
            grammar = self.compile(kind, value)
        except RuntimeError as error:  # "[time] file:line: what is wrong"
            reason = str(error).partition(": ")[2] or str(error)
            raise ValueError(f"{name} is wrong: {reason.strip()}") from error

        def process(token_ids, logits):
            """It reads the answer anew each time, so the answers to a prompt share it.
            At the first call there is no answer yet.
            """
            nonlocal num_prompt_tokens
            num_prompt_tokens = num_prompt_tokens or token_ids.shape[1]
            matcher = xgrammar.GrammarMatcher(grammar)
            for token in token_ids[0, num_prompt_tokens:].tolist():
                matcher.accept_token(token)
            mask = xgrammar.allocate_token_bitmask(1, self.vocab_size)
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device))
            return logits

        return process
