// Names of LaTeX's symbols.

/** "alpha α beta β": each name with its symbol. */
const pairs = (text) => {
  const words = text.trim().split(/\s+/);
  return Object.fromEntries(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
};

export const LETTERS = pairs(`
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν
xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ imath ı jmath ȷ Re ℜ Im ℑ aleph ℵ wp ℘ emptyset ∅ varnothing ∅ degree °
top ⊤ bot ⊥ angle ∠ triangle △ square □ blacksquare ■ checkmark ✓ star ⋆ $ $ % % # # & & _ _`);

export const OPERATORS = pairs(`
pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ dagger † cup ∪ cap ∩ setminus ∖
land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ ll ≪ gg ≫
lt < gt > ne ≠ neq ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ in ∈ ni ∋ notin ∉ subset ⊂ supset ⊃ subseteq ⊆
supseteq ⊇ subsetneq ⊊ perp ⊥ parallel ∥ mid ∣ nmid ∤ vdash ⊢ models ⊨ prec ≺ succ ≻ preceq ⪯ succeq ⪰ asymp ≍ doteq ≐
to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸
iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ uparrow ↑ downarrow ↓ hookrightarrow ↪ rightharpoonup ⇀
leadsto ⇝ rightleftharpoons ⇌ ldots … dots … dotsc … dotsb ⋯ cdots ⋯ vdots ⋮ ddots ⋱ therefore ∴ because ∵ coloneqq ≔
colon : prime ′ backslash \\ lbrace { rbrace } { { } } langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | lvert |
rvert | Vert ‖ lVert ‖ rVert ‖ | ‖ lbrack [ rbrack ] int ∫ iint ∬ iiint ∭ oint ∮`);

/** Delimiters by token. "": none. */
export const FENCES = {
  ".": "", "<": "⟨", ">": "⟩",
  ...Object.fromEntries("{ } | langle rangle lfloor rfloor lceil rceil vert lvert rvert Vert lVert rVert lbrace rbrace lbrack rbrack uparrow downarrow backslash".split(" ").map((name) => [`\\${name}`, OPERATORS[name]])),
};

/** Symbols whose scripts are limits. "": the name is the symbol. */
export const LIMITS = {
  ...pairs("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigwedge ⋀ bigvee ⋁"),
  lim: "", max: "", min: "", sup: "", inf: "", limsup: "lim sup", liminf: "lim inf", argmax: "", argmin: "", det: "", gcd: "", Pr: "",
};
export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker".split(" "),
);

/** Widths in em. */
export const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.25, quad: 1, qquad: 2, "\n": 0.25 };

/** Marks above a symbol, and whether they stand below it. */
export const ACCENTS = {
  hat: ["^"], widehat: ["^"], bar: ["¯"], overline: ["¯"], vec: ["→"], overrightarrow: ["→"], overleftarrow: ["←"],
  tilde: ["~"], widetilde: ["~"], dot: ["˙"], ddot: ["¨"], check: ["ˇ"], breve: ["˘"], acute: ["´"], grave: ["`"],
  mathring: ["˚"], overbrace: ["⏞"], underline: ["_", true], underbrace: ["⏟", true],
};

/** Commands of an alphabet. "rm" is upright, "" the usual one. */
export const FONTS = {
  mathbb: "bb", mathcal: "cal", mathscr: "cal", mathfrak: "frak", mathbf: "bf", boldsymbol: "bold", bm: "bold", mathsf: "sf",
  mathtt: "tt", mathrm: "rm", mathit: "", mathnormal: "",
};

/** Code points of A, a, 0, Α and α in each alphabet, and the letters that Unicode has elsewhere. */
export const ALPHABETS = {
  bb: { starts: [0x1d538, 0x1d552, 0x1d7d8], others: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" } },
  cal: { starts: [0x1d49c, 0x1d4b6], others: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" } },
  frak: { starts: [0x1d504, 0x1d51e], others: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" } },
  bf: { starts: [0x1d400, 0x1d41a, 0x1d7ce, 0x1d6a8, 0x1d6c2] },
  bold: { starts: [0x1d468, 0x1d482, 0x1d7ce, 0x1d71c, 0x1d736] },
  sf: { starts: [0x1d5a0, 0x1d5ba, 0x1d7e2] },
  tt: { starts: [0x1d670, 0x1d68a, 0x1d7f6] },
};
