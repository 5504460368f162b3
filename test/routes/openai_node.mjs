// What OpenAI's SDK for Node makes of the service's answers, as JSON: node openai_node.mjs FOLDER URL
import { createRequire } from "node:module";

const [folder, baseURL] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/package.json`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "rwkv7";
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const city = { type: "object", properties: { city: { type: "string", maxLength: 8 } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters: city, strict: true } }];
const form = { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } };
const told = {};

const plain = { model, messages, max_tokens: 400, seed: 1, temperature: 1, top_p: 0.95 };
const answer = await client.chat.completions.create({ ...plain, max_tokens: 8 });
told.chat = { content: answer.choices[0].message.content, usage: answer.usage };

const stream = client.chat.completions.stream({ ...plain, max_tokens: 8, stream_options: { include_usage: true } });
const streamed = await stream.finalChatCompletion();
told.stream = { content: streamed.choices[0].message.content, usage: streamed.usage };

const formed = await client.chat.completions.parse({ ...plain, response_format: form });
told.formed = { content: formed.choices[0].message.content, reason: formed.choices[0].finish_reason };

const asking = { ...plain, tools, tool_choice: "required", parallel_tool_calls: false };
const called = await client.chat.completions.create(asking);
told.called = { calls: called.choices[0].message.tool_calls, reason: called.choices[0].finish_reason };
const events = [];
const calling = client.chat.completions.stream(asking);
calling.on("tool_calls.function.arguments.done", (event) => events.push({ name: event.name, arguments: event.arguments }));
const whole = await calling.finalChatCompletion();
told.calledInStream = { calls: whole.choices[0].message.tool_calls, events };

const asked = { model, input: "Say something.", max_output_tokens: 8, temperature: 0 };
told.response = (await client.responses.create(asked)).output_text;
let text = "";
const types = [];
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  types.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
told.responseStream = { text, last: types.at(-1) };

const scored = await client.completions.create({ model, prompt: "Hi there", max_tokens: 0, echo: true, logprobs: 1 });
told.scored = scored.choices[0].logprobs.token_logprobs.length;
told.models = (await client.models.list()).data.map((one) => one.id);
try {
  await client.chat.completions.create({ ...plain, regex: "(" });
} catch (error) {
  told.refused = { name: error.constructor.name, status: error.status, param: error.param };
}
console.log(JSON.stringify(told));
