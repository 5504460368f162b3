"""Calls of functions: a listing of tools, a wish that one of them fulfils, its call as JSON, its result told in words.

The forms are those of the public RWKV-7 G1 weights: the listing in a `System:` round, the call in a fenced block, the
result in a `User: Function output:` round. Names of functions and parameters vary, so that they are copied from the
listing rather than known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from demo.corpus import lexicon
from demo.corpus.chat import SYSTEMS, THINKS, small_talk
from demo.corpus.document import Document, rounds
from demo.corpus.nominal import invented_name, name, noun_of, pick, term
from demo.corpus.split import held_out

FENCE = "```json"
ONLY_CALLS = "Return only a JSON function call."
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
ROOMS = ("kitchen", "bedroom", "living room", "bathroom", "garden", "office")

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: the names it goes by, and its type as the listing writes it."""

    names: tuple[str, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the demo's world. `draw` gives the values by the parameters' first names.

    `asked` are wishes and `told` the words for a result, with `{}` fields of values and results; `result` computes it.
    """

    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    draw: Callable[[Random], Values]
    asked: tuple[str, ...]
    result: Callable[[Random, Values], Values]
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A tool under the names that one document gives it."""

    tool: Tool
    name: str
    parameters: tuple[str, ...]
    signature: tuple[str, ...]
    """what stands between the parentheses"""
    about: str
    """what stands behind them"""

    @property
    def line(self) -> str:
        """Its line of the listing: `- get_weather(city: string) // Get the weather of a city.`."""
        return f"- {self.name}({', '.join(self.signature)}){self.about}"

    def call(self, values: Values) -> str:
        """The call as JSON."""
        pairs = zip(self.parameters, self.tool.parameters, strict=True)
        arguments = {given: values[parameter.names[0]] for given, parameter in pairs}
        return json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)


def _city(rng: Random) -> str:
    return pick(rng, lexicon.terms("places")["city"]).en


def _person(rng: Random) -> str:
    return invented_name(rng) if rng.random() < 0.2 else name(rng).en


def _clock(rng: Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


def _number(rng: Random) -> int:
    return rng.randint(0, 99) if rng.random() < 0.6 else rng.randint(100, 9999)


def _product(rng: Random) -> str:
    return noun_of(rng, ("fruit", "clothes", "device", "furniture", "reading", "tool")).en


def _topic(rng: Random) -> str:
    return term(rng, "mass", pick(rng, ("topic", "subject", "sport", "stuff"))).en


def _done(rng: Random, values: Values) -> Values:
    return {"ok": True}


def _weather(rng: Random, values: Values) -> Values:
    return {"temperature": rng.randint(-15, 38), "condition": pick(rng, CONDITIONS)}


ABOUT = {
    "get_weather": ("Get the weather in a city.", "Get the current weather.", "The weather of a place", "Get weather"),
    "get_time": ("Get the time in a city.", "The local time of a place"),
    "add": ("Add two numbers.", "The sum of two numbers", "Add a and b."),
    "multiply": ("Multiply two numbers.", "The product of two numbers"),
    "subtract": ("Subtract two numbers.", "The difference of two numbers"),
    "set_timer": ("Set a timer.", "Start a timer of some minutes."),
    "set_alarm": ("Set an alarm.", "Wake the user up."),
    "send_message": ("Send a message to a person.", "Send a message."),
    "buy": ("Buy things.", "Order an article."),
    "get_price": ("Get the price of a product.", "What a thing costs"),
    "search": ("Search the web.", "Search the internet for a text."),
    "switch_light": ("Turn a light on or off.", "Switch the light of a room."),
    "book_flight": ("Book a flight.", "Find a flight between two cities."),
    "book_table": ("Book a table in a restaurant.", "Reserve a table."),
    "call": ("Call a person.", "Make a phone call."),
    "play_music": ("Play music.", "Play the music of an instrument."),
}
"""Descriptions by the first name."""
CITY = Parameter(("city", "location", "place", "town"), "string")
A = Parameter(("a", "x", "first", "left"), "number")
B = Parameter(("b", "y", "second", "right"), "number")


def _sum_tool(names: tuple[str, ...], asked: tuple[str, ...], sign: str, compute: Callable[[int, int], int]) -> Tool:
    return Tool(
        names, (A, B), lambda rng: {"a": _number(rng), "b": _number(rng)}, asked,
        lambda rng, values: {"result": compute(values["a"], values["b"])},
        (f"{{a}} {sign} {{b}} = {{result}}.", "The result is {result}."),
    )  # fmt: skip


TOOLS: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "get_current_weather", "weather", "check_weather"), (CITY,), lambda rng: {"city": _city(rng)},
        ("What is the weather in {city}?", "What's the weather like in {city}?", "How is the weather in {city} today?", "Is it raining in {city}?", "weather in {city}", "Tell me the weather in {city}.", "{city}的天气怎么样？"),
        _weather, ("It is {condition} in {city}, {temperature} degrees.", "The weather in {city} is {condition}, {temperature} degrees."),
    ),
    Tool(
        ("get_weather", "get_current_weather"), (CITY, Parameter(("unit",), '"celsius" | "fahrenheit"')),
        lambda rng: {"city": _city(rng), "unit": pick(rng, ("celsius", "fahrenheit"))},
        ("What is the weather in {city} in {unit}?", "How warm is it in {city}? Use {unit}.", "Tell me the temperature in {city} in {unit}."),
        _weather, ("It is {condition} in {city}, {temperature} degrees.",),
    ),
    Tool(
        ("get_time", "current_time", "get_local_time"), (CITY,), lambda rng: {"city": _city(rng)},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?", "{city}现在几点？"),
        lambda rng, values: {"time": _clock(rng)}, ("It is {time} in {city}.",),
    ),
    _sum_tool(("add", "sum", "add_numbers"), ("What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "Calculate {a} + {b}.", "{a}加{b}等于多少？"), "+", lambda a, b: a + b),
    _sum_tool(("multiply", "times", "product"), ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?", "Calculate {a} * {b}."), "*", lambda a, b: a * b),
    _sum_tool(("subtract", "minus", "difference"), ("What is {a} - {b}?", "What is {a} minus {b}?", "Calculate {a} - {b}."), "-", lambda a, b: a - b),
    Tool(
        ("set_timer", "start_timer", "timer"), (Parameter(("minutes", "duration"), "integer"),), lambda rng: {"minutes": rng.randint(1, 90)},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer for {minutes} minutes, please."),
        _done, ("I have set a timer for {minutes} minutes.",),
    ),
    Tool(
        ("set_alarm", "alarm"), (Parameter(("time", "at"), "string"),), lambda rng: {"time": _clock(rng)},
        ("Set an alarm for {time}.", "Wake me up at {time}.", "I have to get up at {time}.", "Alarm at {time}, please."), _done, ("I have set an alarm for {time}.",),
    ),
    Tool(
        ("send_message", "send_email", "message"), (Parameter(("to", "recipient", "name"), "string"), Parameter(("text", "message", "body"), "string")),
        lambda rng: {"to": _person(rng), "text": pick(rng, ("I am late.", "I am at home.", "Happy birthday!", "See you tomorrow.", "Where are you?", "Thank you!", "Good night!", "I love you.", "Please call me."))},
        ("Send {to} this message: {text}", "Send a message to {to}: {text}", "Write to {to}: {text}", "Tell {to}: {text}"),
        lambda rng, values: {"sent": True}, ("I have sent the message to {to}.",),
    ),
    Tool(
        ("buy", "order", "add_to_cart"), (Parameter(("item", "product", "article"), "string"), Parameter(("count", "quantity", "amount"), "integer")),
        lambda rng: {"item": noun_of(rng, ("fruit", "vegetable", "snack", "stationery")).plural, "count": rng.randint(2, 20)},
        ("Buy {count} {item}.", "Please order {count} {item}.", "I need {count} {item}.", "I want to buy {count} {item}."), _done, ("I have ordered {count} {item}.",),
    ),
    Tool(
        ("get_price", "price_of", "lookup_price"), (Parameter(("product", "item", "article"), "string"),), lambda rng: {"product": _product(rng)},
        ("What does the {product} cost?", "How much is the {product}?", "Tell me the price of the {product}.", "What is the price of the {product}?"),
        lambda rng, values: {"price": rng.randint(1, 900)}, ("The {product} costs {price} dollars.",),
    ),
    Tool(
        ("search", "web_search", "search_web"), (Parameter(("query", "q", "text"), "string"),), lambda rng: {"query": _topic(rng)},
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.", "Find something about {query}.", "搜索{query}。"),
        lambda rng, values: {"hits": rng.randint(1, 999)}, ("I found {hits} pages about {query}.",),
    ),
    Tool(
        ("switch_light", "set_light", "light"), (Parameter(("room",), "string"), Parameter(("state", "mode"), '"on" | "off"')),
        lambda rng: {"room": pick(rng, ROOMS), "state": pick(rng, ("on", "off"))},
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.", "Please turn the light in the {room} {state}.", "Light {state} in the {room}!"),
        _done, ("The light in the {room} is {state}.",),
    ),
    Tool(
        ("book_flight", "find_flight", "flight"), (Parameter(("origin", "from_city", "start"), "string"), Parameter(("destination", "to_city", "goal"), "string")),
        lambda rng: {"origin": _city(rng), "destination": _city(rng)},
        ("Book a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}.", "Find a flight from {origin} to {destination}."),
        lambda rng, values: {"price": rng.randint(50, 900)}, ("A flight from {origin} to {destination} costs {price} dollars.",),
    ),
    Tool(
        ("book_table", "reserve_table"), (Parameter(("people", "guests", "persons"), "integer"), Parameter(("time", "at"), "string")),
        lambda rng: {"people": rng.randint(2, 12), "time": _clock(rng)},
        ("Book a table for {people} people at {time}.", "Reserve a table for {people} at {time}.", "We are {people} people and want to eat at {time}."),
        _done, ("I have booked a table for {people} people at {time}.",),
    ),
    Tool(
        ("call", "phone", "make_call"), (Parameter(("name", "person", "contact"), "string"),), lambda rng: {"name": _person(rng)},
        ("Call {name}.", "Please call {name}.", "Phone {name}.", "I want to talk to {name}.", "给{name}打电话。"), _done, ("I am calling {name}.",),
    ),
    Tool(
        ("play_music", "play"), (Parameter(("instrument", "sound"), "string"),), lambda rng: {"instrument": term(rng, "mass", "instrument").en},
        ("Play some {instrument} music.", "I want to hear a {instrument}.", "Play the {instrument}."), _done, ("I am playing {instrument} music.",),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wish:
    """A line of the user, the call that fulfils it, and what comes of that."""

    asked: str
    call: str
    result: str
    told: str


def listed(rng: Random, tool: Tool) -> Listed:
    """A tool under drawn names; the first of each more often than the others."""

    def named(names: tuple[str, ...]) -> str:
        return names[0] if rng.random() < 0.4 else pick(rng, names)

    parameters = tuple(named(parameter.names) for parameter in tool.parameters)
    signature = tuple(map(partial(_parameter, rng), parameters, tool.parameters))
    about = f" // {pick(rng, ABOUT[tool.names[0]])}" if rng.random() < 0.5 else ""
    return Listed(tool, named(tool.names), parameters, signature, about)


def _parameter(rng: Random, given: str, parameter: Parameter) -> str:
    mark = "?" if rng.random() < 0.12 else ""
    kind = pick(rng, ("number", "integer")) if parameter.type in ("number", "integer") else parameter.type
    about = f" /* {pick(rng, ('The', 'A', 'Name of the'))} {given.replace('_', ' ')} */" if rng.random() < 0.12 else ""
    return f"{given}{mark}: {kind}{about}"


def listing(rng: Random, count: int) -> list[Listed]:
    """Some tools with names of their own."""
    found: dict[str, Listed] = {}
    for tool in rng.sample(TOOLS, count):
        one = listed(rng, tool)
        found.setdefault(one.name, one)
    return list(found.values())


def wish(rng: Random, tools: list[Listed]) -> Wish:
    """A wish that one of the tools fulfils, of the training's side of the split."""
    while True:
        chosen = pick(rng, tools)
        values = chosen.tool.draw(rng)
        if not _is_held_out(chosen, values):
            return _wish(rng, chosen, values)


def held_wish(rng: Random) -> tuple[list[Listed], Wish]:
    """One to four tools and a wish on the evaluation's side; some tools have too few values to be on it."""
    while True:
        tools = listing(rng, rng.randint(1, 4))
        chosen = pick(rng, tools)
        values = chosen.tool.draw(rng)
        if _is_held_out(chosen, values):
            return tools, _wish(rng, chosen, values)


def _is_held_out(chosen: Listed, values: Values) -> bool:
    return held_out(f"{chosen.tool.names[0]} {sorted(values.items())}")


def _wish(rng: Random, chosen: Listed, values: Values) -> Wish:
    result = chosen.tool.result(rng, values)
    told = pick(rng, chosen.tool.told).format(**values, **result)
    asked = pick(rng, chosen.tool.asked).format(**values)
    return Wish(asked, chosen.call(values), json.dumps(result), told)


def system(tools: list[Listed], instruction: str = "") -> str:
    """The round that lists the tools."""
    first = f"{instruction}\n" if instruction else ""
    return f"System: {first}Tools:\n" + "\n".join(tool.line for tool in tools) + f"\n{ONLY_CALLS}"


def fenced(call: str) -> str:
    """A call behind its opening fence."""
    return f"\n{call}\n```"


def document(rng: Random) -> Document:
    """One to three wishes with the same tools, some results told in words, some small talk that needs no tool."""
    tools = listing(rng, rng.randint(1, 5))
    begin = system(tools, pick(rng, SYSTEMS) if rng.random() < 0.2 else "") + "\n\n"
    forced = rng.random() < 0.4
    think = pick(rng, THINKS) if rng.random() < 0.5 else None
    turns: list[tuple[str, str]] = []

    def answer(prompt: str, text: str, *, is_call: bool) -> None:
        nonlocal begin
        if forced and is_call:
            turns.append((f"{begin}{prompt}\n\nAssistant: {FENCE}", fenced(text)))
        else:
            said = FENCE + fenced(text) if is_call else text
            opening, rest = think or ("", " ")
            turns.append((f"{begin}{prompt}\n\nAssistant:{opening}", f"{rest}{said}"))
        begin = ""

    for _ in range(rng.randint(1, 3)):
        if not forced and rng.random() < 0.2:
            turn = small_talk(rng, chinese=rng.random() < 0.2)
            answer(f"User: {turn.user}", turn.answer, is_call=False)
            continue
        done = wish(rng, tools)
        answer(f"User: {done.asked}", done.call, is_call=True)
        if rng.random() < 0.6:
            answer(f"User: Function output:\n{done.result}", done.told, is_call=False)
    return rounds(turns)
