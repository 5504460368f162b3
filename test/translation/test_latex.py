"""LaTeX: prose is translated, everything else stays byte for byte, and hostile files are refused."""

from __future__ import annotations

import pytest

from rwkv_batch.translation.documents.document import DocumentError
from test.translation.documents import read, round_trip

SOURCE = r"""\documentclass{article} % a class
\usepackage[utf8]{inputenc}
\newcommand{\name}[1]{My #1 thing}
\newtheorem{claim}{Claim}
\title{On the \emph{state} of things}
\author{A. Writer}
\begin{document}
\maketitle
% a comment with words
\section[short]{First steps: 50\% off}\label{sec:one}
Some \textbf{bold and \emph{nested}} text with $x^2 + y$ and
a citation~\cite[p.~3]{knuth}, see \ref{sec:one}. A second ``quoted'' one --- here.\footnote{A note.}

{\bf Heavy} na\"ive Stra{\ss}e, \name{kept}[opt] \verb|code $| and \url{http://a.b/c_d}.
\begin{itemize}
  \item One
  \item[Label] Two & three \\ four
\end{itemize}
\begin{lstlisting}[language=C]
int main() { return "$%"; } /* words */
\end{lstlisting}
\[ E = mc^2 \text{ if so} \]
\begin{figure}\includegraphics[width=3cm]{a.png}\caption{A \href{http://x.y/a_b}{linked} picture.}\end{figure}
\begin{claim} All is well. \end{claim}
\begin{tikzpicture} \draw (0,0) -- node {words} (1,1); \end{tikzpicture}
\end{document}
not read: } {
"""
RESULT = r"""\documentclass{article} % a class
\usepackage[utf8]{inputenc}
\newcommand{\name}[1]{My #1 thing}
\newtheorem{claim}{Claim}
\title{üOn üthe \emph{üstate} üof üthings}
\author{A. Writer}
\begin{document}
\maketitle
% a comment with words
\section[short]{üFirst üsteps: 50\% üoff}\label{sec:one}
üSome \textbf{übold üand \emph{ünested}} ütext üwith $x^2 + y$ üand üa ücitation~\cite[p.~3]{knuth}, üsee \ref{sec:one}. üA üsecond ``üquoted'' üone --- ühere.\footnote{üA ünote.}

{\bf üHeavy} ünaïve üStraße, \name{kept}[opt] \verb|code $| üand \url{http://a.b/c_d}.
\begin{itemize}
  \item üOne
  \item[üLabel] üTwo & üthree \\ üfour
\end{itemize}
\begin{lstlisting}[language=C]
int main() { return "$%"; } /* words */
\end{lstlisting}
\[ E = mc^2 \text{ if so} \]
\begin{figure}\includegraphics[width=3cm]{a.png}\caption{üA \href{http://x.y/a_b}{ülinked} üpicture.}\end{figure}
\begin{claim} üAll üis üwell. \end{claim}
\begin{tikzpicture} \draw (0,0) -- node {words} (1,1); \end{tikzpicture}
\end{document}
not read: } {
"""  # noqa: E501 - a paragraph becomes a line


def test_only_prose_changes() -> None:
    result = round_trip(SOURCE, "a.tex").decode()
    assert result == RESULT
    assert len(read(result, "a.tex").units) == len(read(SOURCE, "a.tex").units)


def test_a_file_without_translations_stays() -> None:
    document = read(SOURCE, "a.tex")
    assert document.write([None] * len(document.units)) == SOURCE.encode()
    assert all("words" not in unit.text and "kept" not in unit.text for unit in document.units)


def test_a_chapter_and_its_characters() -> None:
    content = "A <m0> tag, $a$ and 5\\,\\% of \\$3.\n\n\\chapter*{Two}\n% end"
    document = read(content, "chapter.tex", "zh")
    assert (
        document.write(["50% & {x}_# ~^\\ <mm1/><mm3/>“é”–", None])
        == (
            r"50\% \& \{x\}\_\# \textasciitilde{}\textasciicircum{}\textbackslash{} $a$\,``é''--" + content[33:]
        ).encode()
    )
    assert "like ctex" in document.notes[0] and not read(content, "a.tex").notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{" * 1_000_000, "nested too deep"),
        ("{" * 20_000 + "a" + "}" * 20_000, "nested too deep"),
        (r"\emph{" * 3000, "nested too deep"),
        (r"\section[" * 20_000, "nested too deep"),
        ("one\ntwo $x", "in line 2"),
        (r"\begin{itemize} a", "itemize"),
        (r"\begin{unknown} a", "An environment has no end in line 1"),
        (r"a \end{itemize}", "Unexpected closing environment"),
        ("a } b", "mismatching closing brace"),
        (r"\verb|abc", "correct it"),
        ("a " * 2_200_000, "the limit of LaTeX is 4194304"),
        (b"\xff\xfeA", "is not utf-16-le"),
    ],
    ids=range(12),
)
def test_hostile_files_are_refused(content: str | bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read(content, "a.tex")
