"""From a kernel's text to C++ that clang compiles: few, line-preserving substitutions.

Also the lint: what clang would accept and Apple's or MLX's compiler would not.
"""

from __future__ import annotations

import re

from .generate import METAL_ATTRIBUTES, KernelText

_VECTOR = r"(?:(?:float|half|bfloat|u?int|u?short|u?char|u?long)[234]|vec<[^<>;()]*>)"
# A cast or constructor, but not the declarator `float2 (&a)[4]`.
_CONSTRUCTOR = re.compile(rf"\b({_VECTOR})\s*\((?!\s*&)")
_STATIC_CAST = re.compile(rf"\bstatic_cast<\s*({_VECTOR})\s*>\s*\(")
_INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(?:metal|cuda|cooperative|cstd)[\w./]*>.*$", re.M
)
_ATTRIBUTE = re.compile(r"\s*\[\[[^\]]*\]\]")
_DIMS = r"(?:\s*\[[^;{]*?\])*"
_TYPE = r"[\w:]+(?:<[^;<>]*>)?"
_ALIGN = r"(?:(?:__align__|alignas)\((\d+)\)\s*)?"
_THREADGROUP = re.compile(
    rf"(?<!\w)threadgroup\s+({_TYPE})\s+(\w+{_DIMS}(?:\s*,\s*\w+{_DIMS})*)\s*;"
)
_SHARED = re.compile(
    rf"{_ALIGN}(?<!\w)__shared__\s+{_ALIGN}({_TYPE})\s+(\w+{_DIMS}(?:\s*,\s*\w+{_DIMS})*)\s*;"
)
_DYNAMIC = re.compile(
    rf"extern\s+{_ALIGN}__shared__\s+{_ALIGN}((?:unsigned\s+)?{_TYPE})\s+(\w+)\s*\[\s*\]\s*;"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


class NotMetalError(Exception):
    """The text is C++ that clang accepts and a Mac would refuse, or that means something else."""


def metal_cpp(kernel: KernelText, *, type_build: bool) -> str:
    """The kernel as C++ for metal_shim.h, with an entry that unpacks the argument array."""
    lint_metal(kernel.header, kernel.body)
    ids = [METAL_ATTRIBUTES[name][1] for name in kernel.attributes]
    opening = _ATTRIBUTE.sub("", kernel.opening)
    slots = _type_slots if type_build else _slots
    body = _THREADGROUP.sub(lambda m: slots(m[1], m[2]), _metal_expressions(kernel.body))
    return (
        '#include "metal_shim.h"\n#line 1 "header"\n'
        + _metal_expressions(_INCLUDE.sub("", kernel.header))
        + f'{opening}#line 1 "body"\n{body}\n}}\n'
        + _entry(kernel, ids)
    )


def cuda_cpp(kernel: KernelText) -> str:
    """The kernel as C++ for cuda_shim.h."""
    body = _DYNAMIC.sub(r"\3* \4 = (\3*)shim_dynamic_shared();", kernel.body)
    body = _SHARED.sub(lambda m: _slots(m[3], m[4], m[1] or m[2]), body)
    if match := re.search(r"\b__shared__\b.*", _COMMENT.sub("", body)):
        raise NotMetalError(f"a shared declaration the shim does not understand: {match[0]}")
    return (
        '#include "cuda_shim.h"\n#define inf (__builtin_inff())\nnamespace cooperative_groups {}\n'
        + '#line 1 "header"\n'
        + _INCLUDE.sub("", kernel.header)
        + f'{kernel.opening}#line 1 "body"\n{body}{kernel.closing}'
        + _entry(kernel, [])
    )


def lint_metal(header: str, body: str) -> None:
    """Refuse what a Mac would refuse.

    Raises:
        NotMetalError: naming each rule broken.
    """
    head, statements = _COMMENT.sub("", header), _COMMENT.sub("", body)
    both = head + statements
    rules = {
        "threadgroup variable outside the kernel body": re.search(
            r"^\s*threadgroup\s+[\w:<>, ]+\s+\w+\s*\[[^;]*;", head, re.M
        ),
        "double does not exist in Metal": re.search(r"\bdouble\b", both),
        "quoted #include: the run-time compiler has no include path": re.search(
            r'#\s*include\s+"', both
        ),
        "the C++ standard library does not exist in Metal": re.search(r"\bstd::", both),
        "not in Metal: goto, exceptions, new, delete, virtual, thread_local": re.search(
            r"\b(goto|try|throw|new|delete|virtual|thread_local|dynamic_cast)\b", both
        ),
        "a name that MLX provides is used in the header": re.search(
            rf"\b({'|'.join(METAL_ATTRIBUTES)})\b", head
        ),
    }
    if broken := [f"{rule}: {match[0].strip()}" for rule, match in rules.items() if match]:
        raise NotMetalError("; ".join(broken))


def _metal_expressions(text: str) -> str:
    return _CONSTRUCTOR.sub(r"shim_make<\1>(", _STATIC_CAST.sub(r"shim_make<\1>(", text))


def _slots(element: str, declarators: str, align: str | None = None) -> str:
    """Declarations that bind names to threadgroup memory of the runtime, on one line."""
    lines = []
    for name, dims in _declarators(declarators):
        boundary = f"alignof({name}_array)" if align is None else align
        lines.append(
            f"using {name}_array = {element} {dims}; static const char {name}_key = 0; "
            f"{name}_array& {name} = *({name}_array*)shim_threadgroup_array("
            f'&{name}_key, sizeof({name}_array), {boundary}, "{name}");'
        )
    return " ".join(lines)


def _type_slots(element: str, declarators: str) -> str:
    """The same for the type build, which never runs: clang constructs nothing in address spaces."""
    return " ".join(
        f"using {name}_array = threadgroup {element} {dims}; "
        f"{name}_array& {name} = *({name}_array*)nullptr;"
        for name, dims in _declarators(declarators)
    )


def _declarators(text: str) -> list[tuple[str, str]]:
    """``a[N][4], b[M] -> [("a", "[N][4]"), ("b", "[M]")]``."""
    parts = re.split(r",(?![^\[]*\])", text)
    return [re.fullmatch(rf"\s*(\w+)({_DIMS})\s*", part).groups() for part in parts]


def _entry(kernel: KernelText, ids: list[str]) -> str:
    """``shim_entry(buffers)``: casts each buffer to its parameter's type and calls the kernel."""
    values = []
    for i, argument in enumerate(kernel.arguments):
        pointer = argument.type.rstrip("&*") + "*"
        pointer = pointer if "const" in pointer or argument.kind else "const " + pointer
        values.append(f"{'*' if argument.by_value else ''}({pointer})b[{i}]")
    return (
        'extern "C" __attribute__((visibility("default"))) void shim_entry(void** b) {\n'
        "  const ShimIds& i = *shim_ids(); (void)i;\n"
        f"  {kernel.call}({', '.join(values + ids)});\n}}\n"
    )
