"""Documents: files with texts to translate, a module per family of formats. No HTTP, no engine."""

READERS: dict[str, tuple[str, str, dict[str, str], str]] = {
    "txt": ("lines", "read_text", {}, "txt text"),
    "md": ("markup", "read_markdown", {}, "md markdown"),
    "latex": ("latex", "read_latex", {}, "tex latex ltx"),
    "html": ("markup", "read_html", {}, "html htm xhtml"),
    "epub": ("office", "read_epub", {}, "epub"),
    "docx": ("office", "read_office", {"kind": "docx"}, "docx"),
    "pptx": ("office", "read_office", {"kind": "pptx"}, "pptx"),
    "xlsx": ("office", "read_office", {"kind": "xlsx"}, "xlsx"),
    "odt": ("office", "read_office", {"kind": "odt"}, "odt"),
    "po": ("strings", "read_po", {}, "po pot"),
    "properties": ("strings", "read_properties", {}, "properties"),
    "strings": ("strings", "read_apple_strings", {}, "strings"),
    "xliff": ("interchange", "read_xliff", {}, "xlf xliff"),
    "tmx": ("interchange", "read_tmx", {}, "tmx"),
    "tbx": ("interchange", "read_tbx", {}, "tbx"),
    "android": ("interchange", "read_android", {}, "xml"),
    "json": ("structured", "read_json", {}, "json"),
    "arb": ("structured", "read_json", {"kind": "arb"}, "arb"),
    "xcstrings": ("structured", "read_xcstrings", {}, "xcstrings"),
    "yaml": ("structured", "read_yaml", {}, "yaml yml"),
    "srt": ("lines", "read_subtitles", {}, "srt"),
    "vtt": ("lines", "read_subtitles", {}, "vtt"),
    "ass": ("lines", "read_ass", {}, "ass ssa"),
    "csv": ("lines", "read_table", {}, "csv"),
    "tsv": ("lines", "read_table", {"delimiter": "\t"}, "tsv tab"),
}
"""Format -> module, function and arguments of its reader, and the endings of its files' names."""
FORMATS = tuple(READERS)
