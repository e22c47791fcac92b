"""Small changes of source text: through ``ast`` in Python, through patterns in C++."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

COMPARISONS = {
    "Lt": ("LtE", "GtE"), "LtE": ("Lt", "Gt"), "Gt": ("GtE", "LtE"), "GtE": ("Gt", "Lt"),
    "Eq": ("NotEq",), "NotEq": ("Eq",), "Is": ("IsNot",), "IsNot": ("Is",), "In": ("NotIn",),
    "NotIn": ("In",),
}  # fmt: skip
OPERATORS = {
    "Add": "Sub", "Sub": "Add", "Mult": "Add", "Div": "Mult", "FloorDiv": "Mult",
    "Mod": "FloorDiv", "Pow": "Mult", "BitAnd": "BitOr", "BitOr": "BitAnd", "LShift": "RShift",
    "RShift": "LShift",
}  # fmt: skip
PAIRS = "min max", "amin amax", "minimum maximum", "any all", "argmin argmax", "floor ceil"
EXCHANGED = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
ADJUSTING = {"clamp", "clamp_", "clamp_min", "abs", "round", "clone", "contiguous", "copy", "sort"}
UNSEEN = (None, "strict", "stacklevel", "encoding")  # **keywords, and what no test here sees
NOT_CODE = (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr, ast.Global, ast.Nonlocal)
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Change:
    """A file's text after one change.

    ``covered`` are lines whose tests may notice it, from line 0 if it runs at import: then any
    other test may notice it, too.
    """

    path: Path
    line: int
    before: str
    after: str
    text: str
    covered: range

    @classmethod
    def between(cls, path: Path, old: str, new: str, covered: range) -> Change:
        """The lines that differ, without those before and after that agree."""
        a, b = old.splitlines(), new.splitlines()
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
        most = min(len(a), len(b)) - first
        last = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), most)
        before, after = (
            " ".join(line.strip() for line in lines[first : len(lines) - last]) for lines in (a, b)
        )
        return cls(path, first + 1, before, after, new, covered)


def alternatives(node: ast.AST, earlier: set[str]) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Each change of one node: its kind, what is replaced, and what takes its place."""
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield from (("constant", node, ast.Constant(value + by)) for by in (1, -1))
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator).__name__]:
                    changed = copy.copy(node)
                    changed.ops = [*node.ops[:i], getattr(ast, other)(), *node.ops[i + 1 :]]
                    yield "comparison", node, changed
        case ast.BoolOp(op, values):
            yield (
                "condition",
                node,
                ast.BoolOp(ast.Or() if type(op) is ast.And else ast.And(), values),
            )
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield "condition", node, rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(operand=operand):
            yield "condition" if isinstance(node.op, ast.Not) else "operator", node, operand
        case ast.BinOp(left, operator, right):
            other = OPERATORS.get(type(operator).__name__)
            if other is not None and not any(map(is_text, (left, right))):
                yield "operator", node, ast.BinOp(left, getattr(ast, other)(), right)
                yield from (("operator", node, side) for side in (left, right))
        case ast.Call(func, arguments, keywords):
            name = getattr(func, "id", getattr(func, "attr", ""))
            plain = name not in EXCHANGED and not any(isinstance(a, ast.Starred) for a in arguments)
            for i in range(len(arguments) - 1 if plain else 0):
                one, two = arguments[i : i + 2]
                swapped = [*arguments[:i], two, one, *arguments[i + 2 :]]
                yield "arguments", node, ast.Call(func, swapped, keywords)
            for i, keyword in enumerate(keywords):
                if keyword.arg not in UNSEEN:
                    rest = keywords[:i] + keywords[i + 1 :]
                    yield "keyword", node, ast.Call(func, arguments, rest)
            if name in EXCHANGED:
                other = copy.copy(func)
                setattr(other, "id" if isinstance(func, ast.Name) else "attr", EXCHANGED[name])
                yield "exchange", node, ast.Call(other, arguments, keywords)
            if name in ("min", "max") and isinstance(func, ast.Name) and len(arguments) > 1:
                yield from (("exchange", node, argument) for argument in arguments)
            if isinstance(func, ast.Attribute) and (
                name in ADJUSTING or isinstance(func.value, ast.Call | ast.BinOp)
            ):
                yield "call", node, func.value
        case ast.Slice():
            for name in ("lower", "upper"):
                bound = getattr(node, name)
                if bound is not None:
                    off = ast.BinOp(
                        bound, ast.Sub() if name == "upper" else ast.Add(), ast.Constant(1)
                    )
                    for value in (off, None):
                        changed = copy.copy(node)
                        setattr(changed, name, value)
                        yield "slice", node, changed
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from (("condition", test, ast.Constant(value)) for value in (True, False))
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.While(test=test):
            yield "condition", test, ast.Constant(False)
        case ast.comprehension(ifs=ifs):
            yield from (("condition", test, ast.Constant(True)) for test in ifs)
        case ast.Return(value=value) if value is not None and not is_text(value):
            if not (isinstance(value, ast.Constant) and not value.value):
                yield "return", value, ast.Constant(None)
            if isinstance(value, ast.Compare | ast.BoolOp):
                yield "return", value, ast.UnaryOp(ast.Not(), value)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "statement", node, ast.Pass()
        case ast.Assign(targets=[target]):
            # Without a name's first value the next line would raise, whatever the tests say.
            if {n.id for n in ast.walk(target) if is_stored(n)} <= earlier:
                yield "statement", node, ast.Pass()


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str | bytes)


def python_changes(path: Path, text: str) -> dict[int, list[tuple[str, ast.AST, ast.AST, range]]]:
    """Every change of a file by line; ``render`` makes the text of the one that is drawn."""
    tree = ast.parse(text)
    found: dict[int, list] = {}

    def visit(
        node: ast.AST, function: ast.AST | None, statement: ast.stmt | None, earlier: set
    ) -> None:
        if isinstance(node, NOT_CODE) or (
            (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == "TypeVar")
            or (isinstance(node, ast.keyword) and node.arg in UNSEEN[1:])
        ):
            return
        if isinstance(node, ast.stmt):
            statement = node
        alias = function is None and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
        for kind, target, instead in () if alias else alternatives(node, earlier):
            found.setdefault(target.lineno, []).append(
                (kind, target, instead, covered(tree, function, statement))
            )
        if is_stored(node):
            earlier.add(node.id)
        for field, value in ast.iter_fields(node):
            inner, known = function, earlier
            if isinstance(node, FUNCTIONS) and field == "body":
                own = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
                inner, known = node if not isinstance(node, ast.Lambda) else function, own
            if field not in SKIPPED_FIELDS and not (
                isinstance(node, ast.ClassDef) and field == "keywords"
            ):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, inner, statement, known)

    visit(tree, None, None, set())
    return found


def covered(tree: ast.Module, function: ast.AST | None, statement: ast.stmt | None) -> range:
    """The statement's own lines; of what runs at import, those of the function or the file."""
    if isinstance(statement, FUNCTIONS):
        return range(statement.body[0].lineno, statement.end_lineno + 1)
    if function is None or statement is None:
        return range(tree.body[-1].end_lineno + 1)
    body = getattr(statement, "body", None)
    after = body[0].lineno if body else statement.end_lineno + 1
    return range(statement.lineno, max(after, statement.lineno + 1))


def render(path: Path, text: str, target: ast.AST, instead: ast.AST, lines: range) -> Change | None:
    """The change as text, or None if it is none."""
    code = ast.unparse(instead)
    if isinstance(instead, ast.expr) and not isinstance(
        instead, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript
        | ast.Slice | ast.Tuple | ast.List
    ):  # fmt: skip
        code = f"({code})"
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[target.lineno - 1] + target.col_offset
    end = starts[target.end_lineno - 1] + target.end_col_offset
    new = (raw[:begin] + code.encode() + raw[end:]).decode()
    try:
        if ast.dump(ast.parse(new)) == ast.dump(ast.parse(text)):
            return None
        compile(new, str(path), "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return Change.between(path, text, new, lines)


CPP = {
    "constant": [(r"(?<![\w.])(\d+)(?![\w.])", lambda m: str(int(m[1]) + 1)),
                 (r"(?<![\w.])([1-9]\d*)(?![\w.])", lambda m: str(int(m[1]) - 1))],
    "comparison": [(r" < (?=.*[;)&|?{])", " <= "), (r" <= ", " < "), (r" > (?=.*[;)&|?{])", " >= "),
                   (r" >= ", " > "), (r" == ", " != "), (r" != ", " == ")],
    "operator": [(r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "),
                 (r" \+= ", " -= "), (r"std::min\b", "std::max"), (r"std::max\b", "std::min")],
    "condition": [(r" && ", " || "), (r" \|\| ", " && "), (r"(?<=[(&|] )[^()&|]+ (?:&&|\|\|) ", ""),
                  (r"(?<=\()[^()&|]+ (?:&&|\|\|) ", ""), (r" (?:&&|\|\|) [^()&|;]+(?=[);])", ""),
                  (r"\bif \((?!constexpr)(?=[^;]*\) )", "if (!")],
}  # fmt: skip


def cpp_changes(text: str) -> dict[int, list[tuple[str, int, int, str]]]:
    """Every change of a C++ file by line: its kind, where it begins and ends, what stands there."""
    found: dict[int, list] = {}
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"[^"]*"', lambda m: "\0" * len(m[0]), line.split("//")[0])
        if code.lstrip().startswith(("#", "static_assert", "template", "using", "*")):
            continue
        for kind, rules in CPP.items():
            for pattern, instead in rules:
                for match in re.finditer(pattern, code):
                    new = match.expand(instead) if isinstance(instead, str) else instead(match)
                    found.setdefault(number, []).append((kind, *match.span(), new))
    return found


def draw(files: list[Path], dice: Random) -> Iterator[Change]:
    """Changes of random lines, each once, until there is none left."""
    sites = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        of = python_changes(path, text) if path.suffix == ".py" else cpp_changes(text)
        sites |= {(path, line): (text, found) for line, found in of.items()}
    while sites:
        path, line = place = dice.choice(list(sites))
        text, found = sites[place]
        kind = dice.choice(sorted({site[0] for site in found}))
        site = dice.choice([site for site in found if site[0] == kind])
        found.remove(site)
        if not found:
            del sites[place]
        if path.suffix == ".py":
            change = render(path, text, *site[1:])
        else:
            lines = text.splitlines(keepends=True)
            _, begin, end, new = site
            lines[line - 1] = lines[line - 1][:begin] + new + lines[line - 1][end:]
            change = Change.between(path, text, "".join(lines), range(line, line + 1))
        if change is not None:
            yield change
