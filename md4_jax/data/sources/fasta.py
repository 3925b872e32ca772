"""FASTA: sequences of proteins or nucleic acids, each after a header line that begins with '>'."""

from collections.abc import Iterable, Iterator

from md4_jax.protocols import UserError

ENDINGS = (".fasta", ".fa", ".faa")


def of_fasta(where: str, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (number of the header's line, {text, header}) of the records of a file.

    The text joins all lines up to the next header, without white space. UserError for a file that
    does not begin with a header, and for a header without a sequence.
    """
    begin, header, parts = 0, "", []
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            if begin:
                yield begin, _record(where, begin, header, parts)
            begin, header, parts = number, line[1:].strip(), []
        elif line.strip():
            if not begin:
                raise UserError(
                    f"{where}, line {number}: a FASTA file begins with a line '>NAME', not with "
                    f"{line.strip()[:40]!r}"
                )
            parts += line.split()
    if not begin:
        raise UserError(f"{where} is empty: a FASTA file begins with a line '>NAME'")
    yield begin, _record(where, begin, header, parts)


def _record(where: str, begin: int, header: str, parts: list[str]) -> dict[str, str]:
    if not parts:
        raise UserError(
            f"{where}, line {begin}: no sequence follows the header {header[:40]!r}: remove the "
            "header"
        )
    return {"text": "".join(parts), "header": header}
