"""Answers that keep to a JSON schema, a regular expression, choices or a grammar, or
that call tools: a logits processor, by xgrammar. server.py and as_vllm.py use it.
"""

import json
from functools import reduce
from itertools import combinations

FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri",
    "json-pointer", "relative-json-pointer", "uri-reference", "uri-template", "uuid"}
BOUNDS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}
# What answers keep to, by the form of a schema. xgrammar reads over other keywords, or
# over some of them, so all others are refused.
WHOLE = "$ref", "const", "enum", "anyOf", "oneOf", "allOf"  # these stand alone
ENFORCED = {
    "object": {"additionalProperties", "maxProperties", "minProperties",
               "patternProperties", "properties", "required", "unevaluatedProperties"},
    "array": {"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"},
    "string": {"format", "maxLength", "minLength", "pattern"},
    "integer": BOUNDS, "number": BOUNDS}
TYPED = {  # keywords from which xgrammar concludes a type
    "object": {"additionalProperties", "patternProperties", "properties"},
    "array": {"items", "prefixItems"}}
NOTES = {
    "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
    "default", "definitions", "deprecated", "description", "discriminator", "example",
    "examples", "nullable", "readOnly", "title", "writeOnly"}
KINDS = {bool: "boolean", dict: "object", float: "number", int: "integer",
         list: "array", str: "string", type(None): "null"}


def check_enforced(schema, root=None):
    """ValueError names a keyword of a JSON schema that answers might break."""
    if not isinstance(schema, dict):
        return
    root = root or schema
    types, form = types_of(schema), next((key for key in WHOLE if key in schema), None)
    enforced = {"type"}.union(*(ENFORCED.get(each, ()) for each in types))
    if form:
        # A type beside values may only say again what they are.
        said = types | {"integer"} if "number" in types else types
        kinds = {KINDS[type(value)] for value in values_of(schema)}
        enforced = {form, "type"} if kinds and kinds <= said else {form}
    beside = f"beside {form}" if form else f"with type {', '.join(sorted(types))}"
    wrong = [f"{key} {beside if form or types else 'without a type'}"
             for key, value in schema.items()
             if key not in enforced | NOTES and not key.startswith("x-")
             and (key, value) != ("uniqueItems", False)]
    wrong += unsupported_values(schema, root)
    if wrong:
        raise ValueError(f"not supported: {', '.join(sorted(wrong))}")
    for key, value in schema.items():
        if key in ("$defs", "definitions", "patternProperties", "properties"):
            value = [*value.values()]
        elif key in NOTES or key in ("const", "enum"):
            continue
        for each in value if isinstance(value, list) else [value]:
            check_enforced(each, root)


def unsupported_values(schema, root):
    """Keywords that are enforced, but not with these values, or not together."""
    for key in ("format", "pattern"):
        others = {"pattern", "minLength", "maxLength"} & schema.keys() - {key}
        yield from (f"{key} beside {each}" for each in others if key in schema)
    if schema.get("format", "date") not in FORMATS:
        yield f"format {schema['format']!r}"
    if missing := {*schema.get("required", ())} - {*schema.get("properties", ())}:
        yield f"required {min(missing)!r}, which is not in properties"
    patterns = schema.get("patternProperties", ())
    if patterns and (len(patterns) > 1 or schema.get("properties")
                     or schema.get("additionalProperties")):
        yield "patternProperties beside others"
    names = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
    if schema.get("minProperties") and any(map(schema.get, names)):
        yield "minProperties where names are free (one may come twice)"
    if not schema.get("$ref", "#").startswith("#"):
        yield f"$ref {schema['$ref']!r}"
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several schemas"
    if not all(are_apart(*pair, root)
               for pair in combinations(schema.get("oneOf", ()), 2)):
        yield "oneOf where an answer may fit two (use anyOf)"


def values_of(schema):
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def types_of(schema):
    """The types that a schema names, that its values have, or that xgrammar assumes."""
    named = schema.get("type", [])
    return ({named} if isinstance(named, str) else {*named}) or {
        KINDS[type(value)] for value in values_of(schema)} or {
        name for name, keys in TYPED.items() if keys & schema.keys()}


def are_apart(one, other, root, is_deep=True):
    """Whether it is sure that no answer fits both of these schemas."""
    one, other = resolve(one, root), resolve(other, root)
    kinds = [types_of(each) for each in (one, other)]
    wide = [each | {"number"} if "integer" in each else each for each in kinds]
    values = [{*map(json.dumps, values_of(each))} for each in (one, other)]
    if all(kinds) and not wide[0] & wide[1]:
        return True
    if all(values):
        return not values[0] & values[1]
    common = {*one.get("required", ())} & {*other.get("required", ())}
    return is_deep and kinds == [{"object"}] * 2 and any(are_apart(
        *(each.get("properties", {}).get(name, {}) for each in (one, other)), root,
        is_deep=False) for name in common)


def resolve(schema, root):
    """What a reference within a schema stands for. {} if that is not simple."""
    if isinstance(schema, dict) and "$ref" in schema:
        path = schema["$ref"].removeprefix("#/").split("/")
        schema = reduce(lambda found, name: found.get(name, {}), path, root)
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def of_answers(process):
    """A logits processor from one that takes prompt, answer and logits as tensors."""
    start = None

    def call(ids, logits):
        nonlocal start
        start = start or ids.shape[1]  # at the first call there is no answer yet
        return process(ids[:, :start], ids[:, start:], logits)

    return call


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
            value = self.of_schema(value)
        if kind == "calls":
            return self.compiler.compile_structural_tag(self.calls(*value))
        if kind == "regex":
            return self.compiler.compile_regex(value)
        if kind == "choice":
            value = "root ::= " + " | ".join(
                json.dumps(text, ensure_ascii=False) for text in value)
        return self.compiler.compile_grammar(value)

    def of_schema(self, schema):
        schema = schema if isinstance(schema, str) else json.dumps(schema)
        # With any whitespace, a small model might never stop writing spaces.
        grammar = self.xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)
        check_enforced(json.loads(schema))  # now that xgrammar takes it for a schema
        return grammar

    def calls(self, before, after, tools, may_be_several):
        tags = []
        for name, schema in tools.items():
            grammar = self.of_schema(schema)
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
        xgrammar = self.xgrammar
        try:
            grammar = self.compile(kind, value)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # xgrammar says "[time] file:line: what is wrong".
            reason = str(error)
            reason = reason.partition(": ")[2] if reason.startswith("[") else reason
            raise ValueError(f"{name} is wrong: {reason.strip()}") from error
        matchers = {}  # by the answer so far: all answers to a prompt share this dict

        def process(_, ids, logits):
            answer = ids[0].cpu()
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

        return of_answers(process)
