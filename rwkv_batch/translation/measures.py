"""Numbers with the symbol of a unit, like `5 km` and `3.5 GB`, and the forms that a translation may have of one."""

from __future__ import annotations

import html
import re

from sampling.grammar.constraint import UNSPACED

_NAMES = """
km/h 公里/小时 千米/小时 км/ч; m/s 米/秒 м/с; km² 平方公里 平方千米 км²; m² 平方米 м²; m³ 立方米 м³
km 公里 千米 км; m 米 м; cm 厘米 см; mm 毫米 мм; µm 微米 мкм; nm 纳米 нм; kg 公斤 千克 кг; g 克 г; mg 毫克 мг
t 吨 т; l 升 л; L 升 л; ml 毫升 мл; mL 毫升 мл; °C ℃ 摄氏度 度; °F ℉ 华氏度; ms 毫秒 мс
Hz 赫兹 Гц; kHz 千赫 кГц; MHz 兆赫 МГц; GHz 吉赫 ГГц; W 瓦 Вт; kW 千瓦 кВт; MW 兆瓦 МВт; kWh 千瓦时 кВт·ч
V 伏 В; mA 毫安 мА; mAh 毫安时 мА·ч; kPa 千帕 кПа; kB КБ; KB КБ; MB МБ; GB ГБ; TB ТБ; KiB КиБ; MiB МиБ; GiB ГиБ
MB/s МБ/с; GB/s ГБ/с; kbit/s кбит/с; Mbit/s Мбит/с; Gbit/s Гбит/с; px; pt; dpi
"""
_SYMBOLS = {names.split()[0]: names.split() for names in re.split("[;\\n]", _NAMES.strip())}
"""Symbol -> itself and its names in languages that translate it. Symbols that are words too (`in`) are left out."""
_SPACE = "[ \u00a0\u2009\u202f]"
_GAP = rf"(?:{_SPACE}|&nbsp;|&#160;)?"
_NUMBER = (
    rf"(?:\d{{1,3}}(?:{_SPACE}\d{{3}}){{1,4}}+(?!\d)(?:[.,]\d{{1,12}}+)?"
    r"|\d{1,12}+(?:[.,]\d{1,12}+)*+(?:[eE][-+\u2212]?\d{1,3}+)?)"
)
_DASH = "[-\u2013\u2014~]"
MEASURE = (
    rf"(?<![^\W{UNSPACED}])(?<![-+\u2212±\u2013\u2014.,:/×*'’$€£¥])[-+\u2212±]?{_NUMBER}(?:{_SPACE}?{_DASH}{_SPACE}?{_NUMBER})?"
    rf"{_GAP}(?:{'|'.join(map(re.escape, sorted(_SYMBOLS, key=len, reverse=True)))})(?![^\W{UNSPACED}]|[-/²³'’])"
)
"""Pattern of a number with a unit, also of a range of numbers."""
_PARTS = re.compile(rf"([-+\u2212±]?)({_NUMBER})({_SPACE}?{_DASH}{_SPACE}?)?({_NUMBER})?({_GAP})(.+)")
_GROUPS = re.compile(rf"\d{{1,3}}(?:(?:,\d{{3}})+|(?:\.\d{{3}})+|(?:{_SPACE}\d{{3}})+(?:[.,]\d+)?)")
_SWAPPED = str.maketrans(".,", ",.")
_MINUS, _DASHES = ("-", "\u2212", "零下"), ("-", "\u2013", "到", "至", "~", "～")


def measure_forms(measure: str) -> tuple[str, ...]:
    """Return the forms of a match of MEASURE, as it stands first: other decimal signs, gaps and names of the unit."""
    found = _PARTS.fullmatch(html.unescape(measure))
    assert found is not None, "it is a match of MEASURE"
    sign, first, dash, last, gap, symbol = found.groups(default="")
    signs = (sign, *_MINUS) if sign in _MINUS else (sign,)
    dashes = (dash, *_DASHES) if dash else ("",)
    pairs = zip(_written(first), _written(last), strict=False) if last else ((one, "") for one in _written(first))
    numbers = [f"{one}{a}{between}{b}" for a, b in pairs for one in signs for between in dashes]
    others = (f"{one}{space}{name}" for one in numbers for name in _SYMBOLS[symbol] for space in (gap, "", " "))
    return tuple(dict.fromkeys((measure, *others)))


def _written(number: str) -> list[str]:
    """Return how languages write a number. Equally long for each one."""
    plain = re.sub(rf"{_SPACE}|[.,](?=\d{{3}}\b)", "", number) if _GROUPS.fullmatch(number) else number
    return [number, number.translate(_SWAPPED), plain]
