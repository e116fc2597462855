r"""The reader of mathematical expressions: LaTeX or plain text in, a small tree out.

Everything that stands in the text is in the tree, or reading fails with `ParseError`: a letter, a Greek name, a digit or a
command that is not known is never passed over, as a value without it would be another one. Nothing is evaluated here.

A node is a tuple whose first entry is its kind: ("num", Fraction), ("sym", name), ("const", "pi" | "e" | "i" | "inf"),
("+" | "*" | "/" | "^", left, right), ("neg", node), ("call", function, *nodes), ("sum" | "prod", name, from, to, body).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]
MAX_LENGTH = 1000  # characters
MAX_DEPTH = 60  # brackets in brackets; Python's own stack would end much later
MAX_EXPONENT = 5000  # of e-notation, beyond which a number is not written out

_TOKEN = re.compile(
    r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE](?:[+-]?\d+(?![\d.])|\{[+-]?\d+\}))?)"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<word>[A-Za-z]+)|(?P<other>\S)"
)
_TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc")
_UNARY = {
    *_TRIGONOMETRY, *(f"arc{name}" for name in _TRIGONOMETRY), *(f"{name}h" for name in ("sin", "cos", "tan")),
    "ln", "log", "exp", "abs",
}  # fmt: skip
_MANY = {"min", "max", "gcd", "lcm"}
FUNCTIONS = {*_UNARY, *_MANY, "sqrt"}
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa", "lambda",
    "mu", "nu", "xi", "rho", "varrho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta",
    "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
}  # fmt: skip
_SYMBOLS = {*GREEK, "ell", "hbar", "odot", "partial", "nabla", "aleph"}
_CONSTANTS = {"pi": "pi", "infty": "inf", "infinity": "inf", "e": "e", "i": "i"}
_ACCENTS = {
    "overline",
    "bar",
    "vec",
    "hat",
    "tilde",
    "dot",
    "mathcal",
    "mathbb",
    "overrightarrow",
    "widehat",
    "underline",
}
_FONTS = {
    "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "mbox", "hbox", "mathrm", "mathbf", "mathit",
    "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "operatorname",
}  # fmt: skip
_ATOM_COMMANDS = {*_SYMBOLS, *_CONSTANTS, *FUNCTIONS, *_ACCENTS, *_FONTS, "frac", "binom", "sum", "prod"}
_NAMED = sorted({*FUNCTIONS, "pi"}, key=len, reverse=True)
_TIMES, _OVER = {"*", r"\times", r"\cdot"}, {"/", r"\div"}
_BRACKETS = {"(": ")", "[": "]", "{": "}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\lvert": r"\rvert"}


class ParseError(Exception):
    """The text is no expression that can be read completely."""


@dataclass(frozen=True)
class _Token:
    kind: str  # "number", "command", "word" or "other"
    text: str
    spaced: bool  # whether a blank stands before it: "3 1/2" is mixed, "31/2" is not


def read_expression(text: str) -> Node:
    """Return the tree of `text` (normalised).

    Raises:
        ParseError: where any part of it is not understood.
    """
    if len(text) > MAX_LENGTH:
        raise ParseError(text)
    reader = _Reader(text)
    node = reader.parse_sum()
    if reader.at != len(reader.tokens):
        raise ParseError(text)
    return node


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from walk(child)


def variables(node: Node) -> set[str]:
    """The names that have no value of their own; the index of a sum is bound and not among them."""
    match node:
        case ("sym", name):
            return {name}
        case ("sum" | "prod", name, low, high, body):
            return variables(low) | variables(high) | (variables(body) - {name})
    return set().union(*(variables(child) for child in node[1:] if isinstance(child, tuple)))


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind, spaced = str(match.lastgroup), text[match.start() - 1 : match.start()].isspace()
        if kind == "word" and match.group() not in FUNCTIONS | GREEK | _CONSTANTS.keys():
            # functions and pi inside a run of letters (`2pir`, `xsin`), the rest one variable a letter
            for piece in re.findall("|".join(_NAMED) + "|.", match.group()):
                found.append(_Token(kind, piece, spaced))
                spaced = False
        else:
            found.append(_Token(kind, match.group(), spaced))
    return found


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, _tokens(text)
        self.at = self.depth = self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        place = self.at + ahead
        return self.tokens[place].text if place < len(self.tokens) else ""

    def accept(self, *expected: str) -> str:
        """The next token, behind which reading goes on, where it is one of these; else nothing."""
        token = self.peek()
        if not token or token not in expected:
            return ""
        self.at += 1
        return token

    def expect(self, *expected: str) -> None:
        if not self.accept(*expected):
            raise ParseError(self.text)

    def parse_sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError(self.text)
        node = self.product()
        while sign := self.accept("+", "-"):
            term = self.product()
            node = ("+", node, term if sign == "+" else ("neg", term))
        self.depth -= 1
        return node

    def signed(self) -> Node:
        negative = False
        while sign := self.accept("+", "-"):
            negative ^= sign == "-"
        node = self.power()
        return ("neg", node) if negative else node

    def product(self) -> Node:
        node = self.signed()
        while True:
            if self.accept(*_TIMES):
                node = ("*", node, self.signed())
            elif self.accept(*_OVER):
                node = ("/", node, self.signed())
            elif self.starts_factor():
                node = ("*", node, self.power())
            else:
                return node

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign; digits do only behind a bracket or factorial, as `4 2` is no product."""
        token = self.peek()
        if not token:
            return False
        kind = self.tokens[self.at].kind
        if kind == "number":
            return self.at > 0 and self.peek(-1) in (")", "}", "]", "!")
        if kind == "word":
            return True
        if token == "|":
            return not self.bars
        return token in _BRACKETS or (kind == "command" and token[1:] in _ATOM_COMMANDS)

    def power(self, base: Node | None = None) -> Node:
        node = base or self.mixed()
        while True:
            if self.accept("!"):
                node = ("call", "factorial", node)
            elif self.accept("^"):
                if self.accept(r"\circ"):
                    node = ("/", ("*", node, ("const", "pi")), ("num", Fraction(180)))
                else:
                    node = ("^", node, self.exponent())
            elif self.accept(r"\%", "%"):
                node = ("/", node, ("num", Fraction(100)))
            else:
                return node

    def exponent(self) -> Node:
        if self.peek() == "{":
            return self.atom()
        # the exponent is a power again, as ^ groups from the right
        return ("neg", self.exponent()) if self.accept("-") else self.power(self.atom())

    def mixed(self) -> Node:
        r"""An integer directly before a fraction of integers is added to it: `3\frac{1}{2}`, `3 1/2`."""
        whole, top = self.peek(), self.peek(1)
        if whole.isdigit():
            if top == r"\frac":
                before, (self.at, saved) = self.at, (self.at + 1, list(self.tokens))
                fraction = self.atom()
                if fraction[1][0] == fraction[2][0] == "num":
                    return ("+", ("num", Fraction(whole)), fraction)
                self.at, self.tokens = before, saved
            elif self.peek(2) == "/" and top.isdigit() and self.peek(3).isdigit() and self.tokens[self.at + 1].spaced:
                self.at += 4
                parts = [("num", Fraction(int(token.text))) for token in self.tokens[self.at - 3 : self.at : 2]]
                return ("+", ("num", Fraction(whole)), ("/", *parts))
        return self.atom()

    def atom(self) -> Node:
        token = self.peek()
        if not token:
            raise ParseError(self.text)
        kind = self.tokens[self.at].kind
        if kind == "number":
            self.at += 1
            return ("num", _number(token))
        if token in _BRACKETS:
            self.at += 1
            outer, self.bars = self.bars, self.bars + 1 if token == "|" else 0
            node = self.parse_sum()
            self.expect(_BRACKETS[token])
            self.bars = outer
            function = {r"\lfloor": "floor", r"\lceil": "ceil", r"\lvert": "abs", "|": "abs"}.get(token)
            return ("call", function, node) if function else node
        if kind == "word":
            self.at += 1
            return self.named(token)
        if kind == "command":
            self.at += 1
            return self.command(token[1:])
        raise ParseError(self.text)

    def named(self, name: str) -> Node:
        """What a name stands for: a function with its argument, a constant, or a variable with its index and primes."""
        if name in FUNCTIONS:
            return self.function(name)
        if name == "Delta" and self.at < len(self.tokens) and re.fullmatch("[A-Za-z]", self.peek()):
            name, self.at = f"Delta {self.peek()}", self.at + 1  # a difference is one quantity
        if name in _CONSTANTS and self.peek() != "_":
            return ("const", _CONSTANTS[name])
        if self.accept("_"):
            name += "_" + self.raw()
        while self.accept("'", r"\prime"):
            name += "'"
        before = self.at
        if self.accept("^") and re.fullmatch(r"(?:'|\\prime)+", raised := self.raw()):
            name += "'" * len(re.findall(r"'|\\prime", raised))
        else:
            self.at = before  # a power, if anything
        return ("sym", name)

    def command(self, name: str) -> Node:
        if name in _CONSTANTS or name in _SYMBOLS or name in FUNCTIONS:
            return self.named(name)
        if name in ("frac", "binom"):
            top, bottom = self.argument(), self.argument()
            return ("/", top, bottom) if name == "frac" else ("call", "binom", top, bottom)
        if name in _FONTS:
            return self.font()
        if name in _ACCENTS:
            inner = self.raw()
            if not re.search("[A-Za-z]", inner):
                raise ParseError(self.text)
            return self.named(f"{name}{{{inner}}}")
        if name in ("sum", "prod"):
            return self.series(name)
        raise ParseError(self.text)

    def font(self) -> Node:
        r"""`\mathrm{e}` and `\text{sin}` are what they hold, a longer word is one name."""
        start = self.at
        word = self.raw()
        if re.fullmatch(r"\\?[A-Za-z]+", word):
            return self.command(word[1:]) if word[0] == "\\" else self.named(word)
        self.at = start
        if re.search("[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", word)):  # words and digits are no product of letters
            raise ParseError(self.text)
        return self.atom()

    def raw(self) -> str:
        """The text of the next group, or token, without braces and blanks."""
        if not self.accept("{"):
            self.at += 1
            return self.peek(-1) if self.at <= len(self.tokens) else ""
        inner, depth = [], 1
        while depth:
            token = self.peek()
            if not token:
                raise ParseError(self.text)
            self.at += 1
            depth += (token == "{") - (token == "}")
            inner.append(token)
        # fonts of an index mean nothing: v_{\text{max}}
        return re.sub(r"\\(?:text|mathrm|textrm|textbf|mathbf)|[{}]", "", "".join(inner[:-1]))

    def argument(self) -> Node:
        r"""One argument of \frac: a group, or a single digit, letter or command of what follows (`\frac12`)."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:  # the rest is the next argument, or a factor
            self.tokens[self.at] = _Token("number", token[1:], False)
            return ("num", Fraction(token[0]))
        return self.atom()

    def function(self, name: str) -> Node:
        if name == "sqrt":
            degree: Node | None = None
            if self.accept("["):
                degree = self.parse_sum()
                self.expect("]")
            inside = self.atom()
            return ("call", "root", inside, degree or ("num", Fraction(2)))
        base: Node | None = None
        if self.accept("_"):
            base = self.argument()
            if name != "log":
                raise ParseError(self.text)
        power = self.exponent() if self.accept("^") else None
        if name in _MANY:
            node: Node = ("call", name, *self.listed())
        else:
            inside = self.applied_to()
            if power == ("neg", ("num", 1)) and name in _TRIGONOMETRY:
                name, power = f"arc{name}", None
            node = ("call", "log", inside, base) if base else ("call", "ln" if name == "log" else name, inside)
        return ("^", node, power) if power else node

    def listed(self) -> list[Node]:
        closing = {"(": ")", "{": "}", r"\{": r"\}"}.get(self.peek())
        if closing is None:
            raise ParseError(self.text)
        self.at += 1
        nodes = [self.parse_sum()]
        while self.accept(","):
            nodes.append(self.parse_sum())
        self.expect(closing)
        return nodes

    def applied_to(self) -> Node:
        r"""What a function stands before: a bracket, or the product that follows (`\sin 2x \cos x` ends at cos)."""
        if self.peek() in ("(", "{", "[", "|", r"\lvert") and (self.peek() != "|" or not self.bars):
            return self.atom()
        negative = bool(self.accept("-"))
        node = self.power()
        while self.starts_factor() and self.peek().lstrip("\\") not in FUNCTIONS and self.peek() not in ("(", "["):
            node = ("*", node, self.power())
        return ("neg", node) if negative else node

    def series(self, kind: str) -> Node:
        r"""`\sum_{k=1}^{n}` and `\prod`, over the product that follows."""
        self.expect("_")
        self.expect("{")
        index = self.named(self.accept(*(token.text for token in self.tokens if token.kind == "word")))
        self.expect("=")
        low = self.parse_sum()
        self.expect("}")
        self.expect("^")
        high = self.exponent()
        if index[0] == "const":
            index = ("sym", index[1])
        return (kind, index[1], low, high, self.product())


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    power = int(exponent.strip("{}")) if exponent else 0
    if abs(power) > MAX_EXPONENT:
        raise ParseError(token)
    return Fraction("0" + mantissa.removesuffix(".")) * Fraction(10) ** power
