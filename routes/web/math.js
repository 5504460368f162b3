// Typesets LaTeX maths of an answer as MathML, which browsers show without a font or a style of ours.

import { ACCENTS, ALPHABETS, FENCES, FONTS, FUNCTIONS, LETTERS, LIMITS, OPERATORS, SPACES } from "./math_symbols.js";

/** Bounds of one formula: characters, and groups within groups. */
const MAX_LENGTH = 5000;
const MAX_DEPTH = 40;
const BRACKET = /^[()[\]{}|‖⟨⟩⌊⌋⌈⌉↑↓]$/;
const TOKEN = /\\[a-zA-Z]+|\\[^]|\s+|[^]/uy;
const ROW_ENDS = ["", "}", "&", "\\\\", "\\cr", "\\right", "\\end"];
const LENGTH_AFTER_ROW = /\s*\[-?[\d.]+\s*[a-z]{2}\]/y;

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
/** Text for HTML. */
export const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ESCAPES[letter]);
const tag = (name, inner, attributes = "") => `<${name}${attributes && ` ${attributes}`}>${inner}</${name}>`;
const operator = (text, attributes = BRACKET.test(text) ? 'stretchy="false"' : "") => tag("mo", escaped(text), attributes);
const stretched = (text) => operator(text, 'stretchy="true" fence="true"');
const rowOf = (parts) => (parts.length === 1 ? parts[0] : tag("mrow", parts.join("")));
const space = (em) => `<mspace width="${em}em"></mspace>`;
const fraction = (over, under, attributes) => tag("mfrac", over + under, attributes);

/** A letter or digit of an alphabet: "bb" gives ℝ for R. */
function styled(letter, font) {
  const alphabet = ALPHABETS[font];
  const kind = alphabet && [/[A-Z]/, /[a-z]/, /[0-9]/, /[Α-Ω]/, /[α-ω]/].findIndex((letters) => letters.test(letter));
  if (!alphabet || kind < 0 || !alphabet.starts[kind]) return letter;
  return alphabet.others?.[letter] ?? String.fromCodePoint(alphabet.starts[kind] + letter.codePointAt(0) - "Aa0Αα".codePointAt(kind));
}

/** Reads one formula. Each method returns MathML and stands after what it has read. Throws Error on unknown LaTeX. */
class Reader {
  constructor(source, depth = 0) {
    Object.assign(this, { source, at: 0, depth, font: "" });
  }

  /** The next token, without reading it. "" at the end. */
  peek() {
    TOKEN.lastIndex = this.at;
    return TOKEN.exec(this.source)?.[0] ?? "";
  }

  next() {
    const token = this.peek();
    this.at += token.length;
    return token;
  }

  /** The next token that is no white space. */
  word() {
    while (/^\s/.test(this.peek())) this.next();
    return this.next();
  }

  took(token) {
    const start = this.at;
    if (this.word() === token) return true;
    this.at = start;
    return false;
  }

  expect(token) {
    if (!this.took(token)) throw new Error(`the formula lacks ${token}`);
  }

  /** The text of a group in braces, unread. */
  raw() {
    this.expect("{");
    const start = this.at;
    for (let open = 1; open; ) {
      const token = this.next();
      if (!token) throw new Error("the formula lacks }");
      open += (token === "{") - (token === "}");
    }
    return this.source.slice(start, this.at - 1);
  }

  text() {
    return tag("mtext", escaped(this.raw().replace(/\\([^a-zA-Z])/g, "$1").replace(/[ ~]/g, "\u00a0")));
  }

  /** A group in braces, or one symbol. */
  argument(font = this.font) {
    const before = this.font;
    this.font = font;
    const token = this.word();
    const read = token === "{" ? this.group("}") : /\d/.test(token) ? tag("mn", styled(token, font)) : this.atom(token).html;
    this.font = before;
    return read;
  }

  group(end) {
    if (++this.depth > MAX_DEPTH) throw new Error("groups within groups");
    const read = rowOf(this.row());
    this.depth -= 1;
    this.expect(end);
    return read;
  }

  /** What stands before the next end of a row: its parts. */
  row() {
    const parts = [];
    for (;;) {
      const token = this.peek();
      if (ROW_ENDS.includes(token)) return parts;
      this.next();
      if (/^\s/.test(token)) continue;
      parts.push(token === "\\displaystyle" ? tag("mstyle", this.row().join(""), 'displaystyle="true"') : this.scripts(this.atom(token)));
    }
  }

  /** An atom with its subscript, superscript and primes. */
  scripts({ html, limits }) {
    let [under, over, primes] = ["", "", ""];
    for (;;) {
      if (this.took("\\limits")) limits = true;
      else if (this.took("\\nolimits")) limits = false;
      else if (this.took("_")) under = this.argument();
      else if (this.took("^")) over = this.argument();
      else if (this.took("'")) primes += "′";
      else break;
    }
    if (primes) over = rowOf([operator(primes), ...(over ? [over] : [])]);
    if (!under && !over) return html;
    const name = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return tag(name[under && over ? 2 : over ? 1 : 0], html + under + over);
  }

  atom(token) {
    if (++this.depth > MAX_DEPTH) throw new Error("groups within groups");
    const read = token.startsWith("\\") ? this.command(token.slice(1)) : this.symbol(token);
    this.depth -= 1;
    return typeof read === "string" ? { html: read, limits: false } : read;
  }

  symbol(token) {
    if (token === "{") return this.group("}");
    if (token === "~") return space(SPACES[" "]);
    if (/\d/.test(token)) {
      let digits = token;
      while (/\d/.test(this.peek()) || (this.peek() === "." && /\d/.test(this.source[this.at + 1]))) digits += this.next();
      return tag("mn", [...digits].map((digit) => styled(digit, this.font)).join(""));
    }
    if (/\p{L}/u.test(token)) return this.letter(token);
    if ("_^'".includes(token)) {
      this.at -= token.length;
      return tag("mi", "");
    }
    if (!token || "}&#%$".includes(token)) throw new Error(`no symbol at ${this.at}`);
    return operator({ "-": "−", "*": "∗" }[token] ?? token);
  }

  letter(text) {
    const isUpright = this.font === "rm" || text.codePointAt(0) > 0x2fff;
    return tag("mi", escaped(styled(text, this.font)), isUpright || /[Α-Ω]/.test(text) ? 'mathvariant="normal"' : "");
  }

  /** A delimiter after \left, \right or \big. */
  fence() {
    const token = this.word();
    const found = FENCES[token] ?? (/^[()[\]|/]$/.test(token) ? token : undefined);
    if (found === undefined) throw new Error(`no delimiter: ${token}`);
    return found;
  }

  command(name) {
    if (name in LETTERS) return this.letter(LETTERS[name]);
    if (name in OPERATORS) return operator(OPERATORS[name]);
    if (name in SPACES) return space(SPACES[name]);
    if (name in LIMITS) return { html: tag("mo", LIMITS[name] || name, LIMITS[name] ? "" : 'movablelimits="true"'), limits: true };
    if (FUNCTIONS.has(name)) return this.named(name);
    if (name in ACCENTS) {
      const [mark, under] = ACCENTS[name];
      const stretchy = /^(wide|over|under)/.test(name);
      return { html: tag(under ? "munder" : "mover", this.argument() + operator(mark, `stretchy="${stretchy}"`), under ? 'accentunder="true"' : 'accent="true"'), limits: name.endsWith("brace") };
    }
    if (name in FONTS) return this.argument(FONTS[name]);
    if (/^(text(rm|bf|it|tt|sf|normal)?|mbox|hbox)$/.test(name)) return this.text();
    if (/^[bB]igg?[lrm]?$/.test(name)) return operator(this.fence(), `stretchy="true" minsize="${{ b: 1.2, B: 1.8 }[name[0]] + (name[3] === "g" ? 1.2 : 0)}em"`);
    const act = COMMANDS[name];
    if (!act) throw new Error(`unknown: \\${name}`);
    return act(this);
  }

  /** A function's name, with a thin space before an argument without brackets. */
  named(name) {
    const rest = /^\s*([_^(\[\\{]?)/.exec(this.source.slice(this.at));
    return tag("mi", escaped(name)) + (rest[1] || !this.source.slice(this.at).trim() ? "" : space(SPACES[","]));
  }

  /** The whole formula. */
  whole() {
    const read = this.table("");
    if (this.word()) throw new Error("an end without its beginning");
    return read;
  }

  /** Rows of cells up to the end of the environment or of the formula. */
  table(attributes) {
    const rows = [[]];
    for (;;) {
      this.took("\\hline");
      rows.at(-1).push(rowOf(this.row()));
      if (this.took("&")) continue;
      if (!this.took("\\\\") && !this.took("\\cr")) break;
      LENGTH_AFTER_ROW.lastIndex = this.at;
      this.at += LENGTH_AFTER_ROW.exec(this.source)?.[0].length ?? 0;
      rows.push([]);
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && rows.at(-1)[0] === tag("mrow", "")) rows.pop();
    return rows.length === 1 && rows[0].length === 1 && !attributes
      ? rows[0][0]
      : tag("mtable", rows.map((cells) => tag("mtr", cells.map((cell) => tag("mtd", cell)).join(""))).join(""), attributes || ALIGNED);
  }
}

const ALIGNED = 'displaystyle="true" columnalign="right left"';
const MATRICES = { matrix: "", smallmatrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖" };
const ALIGNMENTS = /^(align|aligned|alignat|split|eqnarray|gather|gathered|multline|equation)\*?$/;

/** \begin{name} … \end{name} */
function environment(reader) {
  const name = reader.raw();
  const around = (open, table, close) => (open || close ? rowOf([stretched(open), table, stretched(close)]) : table);
  let read;
  if (name.replace("*", "") in MATRICES) {
    const [open = "", close = ""] = MATRICES[name.replace("*", "")];
    read = around(open, reader.table('columnalign="center"'), close);
  } else if (/^[dr]?cases$/.test(name)) read = name === "rcases" ? around("", reader.table('columnalign="left"'), "}") : around("{", reader.table('columnalign="left"'), "");
  else if (name === "array") {
    const columns = reader.raw().replace(/[^lcr]/g, "").split("");
    read = reader.table(`columnalign="${columns.map((one) => ({ l: "left", c: "center", r: "right" })[one]).join(" ")}"`);
  } else if (ALIGNMENTS.test(name)) read = reader.table(/^(gather|multline|equation)/.test(name) ? 'displaystyle="true" columnalign="center"' : ALIGNED);
  else throw new Error(`unknown: \\begin{${name}}`);
  reader.expect("\\end");
  if (reader.raw() !== name) throw new Error(`the formula lacks \\end{${name}}`);
  return read;
}

/** A part between \left and \right. */
function fenced(reader) {
  const parts = [stretched(reader.fence()), ...reader.row()];
  reader.expect("\\right");
  return rowOf([...parts, stretched(reader.fence())]);
}

function root(reader) {
  const degree = /^\s*\[([^\]]*)\]/.exec(reader.source.slice(reader.at));
  if (!degree) return tag("msqrt", reader.argument());
  reader.at += degree[0].length;
  return tag("mroot", reader.argument() + new Reader(degree[1], reader.depth).whole());
}

const stacked = (name, isFirstBase) => (reader) => {
  const [mark, base] = [reader.argument(), reader.argument()];
  return tag(name, isFirstBase ? mark + base : base + mark);
};
const arrow = (text) => (reader) => tag("mover", operator(text, 'stretchy="true"') + tag("mpadded", reader.argument(), 'lspace="0.3em" width="+0.6em"'));
const binomial = (reader) => rowOf([stretched("("), fraction(reader.argument(), reader.argument(), 'linethickness="0"'), stretched(")")]);
const skipped = (reader) => (reader.raw(), "");
const modulo = (reader) => rowOf([space(0.5), operator("("), tag("mi", "mod"), space(0.25), reader.argument(), operator(")")]);
const plainFraction = (reader) => fraction(reader.argument(), reader.argument());

const COMMANDS = {
  begin: environment, left: fenced, sqrt: root, frac: plainFraction, tfrac: plainFraction, cfrac: plainFraction,
  dfrac: (reader) => tag("mstyle", plainFraction(reader), 'displaystyle="true"'),
  binom: binomial, dbinom: binomial, tbinom: binomial,
  middle: (reader) => stretched(reader.fence()),
  operatorname: (reader) => {
    const limits = reader.took("*");
    return limits ? { html: tag("mo", escaped(reader.raw()), 'movablelimits="true"'), limits } : reader.named(reader.raw());
  },
  overset: stacked("mover"), stackrel: stacked("mover"), underset: stacked("munder"),
  xrightarrow: arrow("→"), xleftarrow: arrow("←"),
  boxed: (reader) => tag("menclose", reader.argument(), 'notation="box"'),
  phantom: (reader) => tag("mphantom", reader.argument()),
  not: (reader) => reader.atom(reader.word()).html.replace(/(?=<\/m[oi]>$)/, "\u0338"),
  substack: (reader) => {
    reader.expect("{");
    const read = reader.table('columnalign="center"');
    reader.expect("}");
    return read;
  },
  pmod: modulo, bmod: () => rowOf([space(0.2), tag("mi", "mod"), space(0.2)]),
  tag: (reader) => rowOf([space(2), operator("("), reader.text(), operator(")")]),
  color: skipped, label: skipped, hspace: skipped, textcolor: (reader) => (reader.raw(), reader.argument()),
  nonumber: () => "", notag: () => "", textstyle: () => "", scriptstyle: () => "",
};

/** MathML of a formula. A formula with LaTeX that this does not know is shown as its source. */
export function mathml(source, isDisplay) {
  try {
    if (source.length > MAX_LENGTH) throw new Error("a long formula");
    return tag("math", new Reader(source).whole(), isDisplay ? 'display="block"' : "");
  } catch {
    return tag("code", escaped(source));
  }
}
