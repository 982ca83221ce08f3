"""Answers that keep to a JSON schema, a regular expression, choices or a grammar, or
that call tools: a logits processor, by xgrammar. server.py and as_vllm.py use it.
"""

import json

# Keywords that xgrammar reads over: its answers might break them.
UNENFORCED = {
    "$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas",
    "if", "maxContains", "minContains", "not", "uniqueItems"}
# What may stand beside these is read over, too.
UNENFORCED_BESIDE = {
    "format": {"minLength", "maxLength"}, "pattern": {"minLength", "maxLength"},
    "propertyNames": {"properties", "patternProperties"},
    **dict.fromkeys(("$ref", "allOf", "anyOf", "oneOf"), {
        "items", "maximum", "maxItems", "maxLength", "minimum", "minItems", "minLength",
        "pattern", "properties", "required"})}
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri",
    "json-pointer", "relative-json-pointer", "uri-reference", "uri-template", "uuid"}


def check_enforced(schema):
    """ValueError names a keyword of a JSON schema that answers might break."""
    if not isinstance(schema, dict):
        return
    wrong = [key for key in schema if key in UNENFORCED and schema[key]]
    for key, others in UNENFORCED_BESIDE.items():
        wrong += [f"{key} beside {each}" for each in others & schema.keys()
                  if key in schema]
    if len(schema.get("allOf") or []) > 1:
        wrong.append("allOf of several schemas")
    if schema.get("format", "date") not in FORMATS:
        wrong.append(f"format {schema['format']!r}")
    if wrong:
        raise ValueError(f"not supported: {', '.join(sorted(wrong))}")
    for key, value in schema.items():
        if key in ("$defs", "definitions", "patternProperties", "properties"):
            value = [*value.values()] if isinstance(value, dict) else value
        if key not in ("const", "default", "enum", "examples"):
            for each in value if isinstance(value, list) else [value]:
                check_enforced(each)


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
        """kind: "json" for a schema, "regex", "choice" for a list, "grammar", or
        "calls" for (the mark before a call, the one after it, schemas of arguments by
        a tool's name, whether there may be several calls).
        """
        if kind == "json":
            schema = value if isinstance(value, str) else json.dumps(value)
            check_enforced(json.loads(schema))
            # With any whitespace, a small model might never stop writing spaces.
            return self.compiler.compile_json_schema(schema, any_whitespace=False)
        if kind == "calls":
            return self.compiler.compile_structural_tag(self.calls(*value))
        if kind == "regex":
            return self.compiler.compile_regex(value)
        if kind == "choice":
            value = "root ::= " + " | ".join(
                json.dumps(text, ensure_ascii=False) for text in value)
        return self.compiler.compile_grammar(value)

    def calls(self, before, after, tools, may_be_several):
        tags = []
        for name, schema in tools.items():
            check_enforced(schema)
            grammar = self.xgrammar.Grammar.from_json_schema(
                json.dumps(schema), any_whitespace=False)
            begin = f'{before}\n{{"name": {json.dumps(name)}, "arguments": '
            tags.append({"type": "tag", "begin": begin, "end": f"}}\n{after}",
                         "content": {"type": "grammar", "grammar": str(grammar)}})
        return {"type": "structural_tag", "format": {
            "type": "tags_with_separator", "tags": tags, "separator": "\n",
            "at_least_one": True, "stop_after_first": not may_be_several}}

    def processor(self, kind, value, name):
        """A logits processor for one request, which lets only tokens pass that lead to
        such an answer. ValueError says what is wrong with the value called `name`.
        """
        xgrammar, num_prompt_tokens = self.xgrammar, None
        try:
            grammar = self.compile(kind, value)
        except (RuntimeError, ValueError) as error:
            # xgrammar says "[time] file:line: what is wrong".
            reason = str(error)
            reason = reason.partition(": ")[2] if reason.startswith("[") else reason
            raise ValueError(f"{name} is wrong: {reason.strip()}") from error
        matchers = {}  # by the answer so far: all answers to a prompt share this dict

        def process(token_ids, logits):
            nonlocal num_prompt_tokens
            # At the first call there is no answer yet.
            num_prompt_tokens = num_prompt_tokens or token_ids.shape[1]
            answer = token_ids[0, num_prompt_tokens:].cpu()
            key, before = (ids.numpy().tobytes() for ids in (answer, answer[:-1]))
            if key not in matchers:
                # One has read all but the last token, unless another answer, the same
                # until then, has taken it along.
                matcher = matchers.pop(before, None) if key else None
                new = answer[-1:] if matcher else answer
                matchers[key] = matcher or xgrammar.GrammarMatcher(grammar)
                for token in new.tolist():
                    matchers[key].accept_token(token)
            mask = xgrammar.allocate_token_bitmask(1, self.vocab_size)
            matchers[key].fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device))
            return logits

        return process
