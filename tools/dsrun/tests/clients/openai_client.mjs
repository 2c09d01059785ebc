// The official JavaScript client of OpenAI's API: answers, fields, histories, tools, forms, vectors, errors, Responses.
//
// usage: openai_client.mjs URL KEY MODEL [PART..]
//
// `reasoning` is a part only for a model that reasons until the token `</think>`.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat, zodFunction, zodResponsesFunction } from "openai/helpers/zod";
import { City, Place, QUESTION, Time, content, isCity, run, streamed, weather } from "./shared.mjs";

const MESSAGES = [{ role: "user", content: QUESTION }];
const MORE = { role: "user", content: "Why?" };
// Tools of the SDK are strict.
const WEATHER = zodFunction({ name: "weather", description: "The weather of a city.", parameters: Place });
const TIME = zodFunction({ name: "time", parameters: Time });
const FREE = { messages: MESSAGES, max_completion_tokens: 16, temperature: 0 };
const LONG = { messages: MESSAGES, max_completion_tokens: 1000, temperature: 1 };
const ONE = { tool_choice: "required", parallel_tool_calls: false };

function connect(url, key) {
    return new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
}

/** A function that asks for an answer. */
function chat(url, key, model, settings) {
    const { completions } = connect(url, key).chat;
    return fields => completions.create({ model, ...settings, ...fields });
}

/** Asserts that an answer is refused for one of its fields. */
async function refused(answer, param) {
    await assert.rejects(answer, error => error instanceof OpenAI.BadRequestError && (param === undefined || error.param === param));
}

async function answers(url, key, model) {
    const { completions } = connect(url, key).chat;
    const ask = { model, ...FREE };
    const answer = await completions.create(ask);
    const text = content(answer);
    assert(text);
    assert.equal(await streamed(completions.create({ ...ask, stream: true })), text);
    const stream = completions.stream({ ...ask, stream_options: { include_usage: true } });
    assert.equal(await stream.finalContent(), text);
    assert.equal((await stream.totalUsage()).completion_tokens, answer.usage.completion_tokens);
}

async function usage(url, key, model) {
    // A cache of its own, in which nothing is found at first.
    const messages = [{ role: "user", content: "Where is it raining? ".repeat(10) }];
    const ask = chat(url, key, model, { ...FREE, messages, cache_salt: randomUUID() });
    const [first, again] = [await ask(), await ask()];
    assert.equal(first.usage.prompt_tokens_details.cached_tokens, 0);
    const { cached_tokens } = again.usage.prompt_tokens_details;
    assert(cached_tokens > 200 && cached_tokens < again.usage.prompt_tokens, `${cached_tokens}`);
    assert.match(first.system_fingerprint, /^fp_/);
    assert.equal(again.system_fingerprint, first.system_fingerprint);
}

/** Fields that the server documents to have no effect: the answer is the one without them. */
async function withoutEffect(url, key, model) {
    const ask = chat(url, key, model, FREE);
    const openais = {
        store: true, metadata: { run: "1" }, service_tier: "auto", prompt_cache_key: "k", prompt_cache_retention: "24h", user: "u",
        safety_identifier: "s", verbosity: "low", modalities: ["text"], reasoning_effort: "low", top_logprobs: 0,
    };
    const others = { best_of: 1, cache_prompt: true, skip_special_tokens: true, spaces_between_special_tokens: true };
    const text = content(await ask());
    assert.equal(content(await ask({ ...openais, ...others })), text);
    const stream_options = { include_usage: false, include_obfuscation: false, continuous_usage_stats: false };
    assert.equal(await streamed(ask({ ...openais, ...others, stream: true, stream_options })), text);
    // They have none only with these values.
    for (const [name, value] of Object.entries({ best_of: 2, skip_special_tokens: false, modalities: ["text", "audio"] })) {
        await refused(ask({ [name]: value }), name);
    }
}

/** `null` in fields is as if they were absent. */
async function nulls(url, key, model) {
    const ask = chat(url, key, model, FREE);
    const names = "audio frequency_penalty function_call functions logit_bias logprobs max_tokens metadata modalities n " +
        "parallel_tool_calls prediction presence_penalty reasoning_effort response_format seed service_tier stop store stream " +
        "stream_options tool_choice tools top_logprobs top_p user verbosity web_search_options";
    assert.equal(content(await ask(Object.fromEntries(names.split(" ").map(name => [name, null])))), content(await ask()));
}

/** An answer is sent back as it came, or as others dump it: the next answer is that to its text alone. */
async function histories(url, key, model) {
    const ask = chat(url, key, model, FREE);
    const { message } = (await ask()).choices[0];
    const next = async form => content(await ask({ messages: [...MESSAGES, form, MORE] }));
    const plain = await next({ role: "assistant", content: message.content });
    const parts = [{ type: "text", text: message.content, annotations: [], cache_control: { type: "ephemeral" } }];
    for (const added of [
        {}, { annotations: [], audio: null, function_call: null, tool_calls: null, refusal: null, parsed: null }, { content: parts },
        { provider_specific_fields: { refusal: null }, thinking_blocks: [], reasoning: "hm", reasoning_content: null },
    ]) {
        assert.equal(await next({ ...message, ...added }), plain, JSON.stringify(added));
    }
}

/** The form of an answer, and tokens that stop it, by the names of vLLM. */
async function ofVllm(url, key, model) {
    const ask = chat(url, key, model, { ...LONG, seed: 1 });
    const schema = zodResponseFormat(City, "city").json_schema.schema;
    const forms = {
        choice: [["Paris", "Rome"], text => text === "Paris" || text === "Rome"],
        json: [schema, text => isCity(JSON.parse(text))],
        regex: ["[a-c]{3}", text => /^[a-c]{3}$/.test(text)],
        grammar: ["start: /[a-c]{3}/", text => /^[a-c]{3}$/.test(text)],
    };
    for (const [name, [value, follows]] of Object.entries(forms)) {
        for (const fields of [{ structured_outputs: { [name]: value } }, { [`guided_${name}`]: value }]) {
            const text = content(await ask(fields));
            assert(follows(text), `${JSON.stringify(fields)}: ${text}`);
        }
    }
    const plain = { model, prompt: "ab", max_tokens: 12, temperature: 0, ignore_eos: true, return_token_ids: true };
    const complete = async fields => (await connect(url, key).completions.create({ ...plain, ...fields })).choices[0];
    const { token_ids: tokens } = await complete();
    const stopped = await complete({ stop_token_ids: [tokens[6]] });
    assert.deepEqual(stopped.token_ids, tokens.slice(0, tokens.indexOf(tokens[6])));
    assert.equal(stopped.finish_reason, "stop");
}

async function tools(url, key, model) {
    const client = connect(url, key);
    const ask = { model, ...LONG };
    // The loop of the client, of two turns. A named tool is called in each.
    const calls = [];
    const parameters = { name: "weather", parameters: Place, function: place => (calls.push(place), weather(place)) };
    const loop = { ...ask, tools: [zodFunction(parameters)], seed: 1 };
    for (const tool_choice of [{ type: "function", function: { name: "weather" } }, "auto"]) {
        for (const stream of [false, true]) {
            await client.chat.completions.runTools({ ...loop, tool_choice, stream }, { maxChatCompletions: 2 }).done();
        }
    }
    assert(calls.length >= 2 && calls.every(place => Place.safeParse(place).success), JSON.stringify(calls));
    // Arguments come in pieces, and the answer can be sent back.
    for (let seed = 0; seed < 3; seed++) {
        const stream = client.chat.completions.stream({ ...ask, ...ONE, seed, tools: [WEATHER] });
        const deltas = [];
        stream.on("tool_calls.function.arguments.delta", event => deltas.push(event.arguments_delta));
        const { message } = (await stream.finalChatCompletion()).choices[0];
        const [call] = message.tool_calls;
        assert(deltas.length > 3, JSON.stringify(deltas));
        assert.equal(deltas.join(""), call.function.arguments);
        assert(Place.safeParse(call.function.parsed_arguments).success);
        const messages = [...MESSAGES, message, { role: "tool", tool_call_id: call.id, content: "Rain" }];
        assert(content(await client.chat.completions.create({ ...ask, ...FREE, messages, tools: [WEATHER] })));
    }
    // Text is free while the model decides, whether tools are strict or not.
    const text = fields => chat(url, key, model, FREE)(fields).then(content);
    const free = { type: "function", function: { ...WEATHER.function, strict: false } };
    assert.equal(await text({ tools: [WEATHER], tool_choice: "auto" }), await text({ tools: [free] }));
}

async function allowedTools(url, key, model) {
    const ask = chat(url, key, model, { ...LONG, tools: [WEATHER, TIME], parallel_tool_calls: false });
    const only = (mode, name) => ({ type: "allowed_tools", allowed_tools: { mode, tools: [{ type: "function", function: { name } }] } });
    for (let seed = 0; seed < 4; seed++) {
        const { message } = (await ask({ seed, tool_choice: only("required", "time") })).choices[0];
        assert.deepEqual(message.tool_calls.map(call => call.function.name), ["time"]);
        assert(Time.safeParse(JSON.parse(message.tool_calls[0].function.arguments)).success);
    }
    const auto = await ask({ ...FREE, tool_choice: only("auto", "time") });
    assert.equal(content(auto), content(await ask({ ...FREE, tools: [TIME] })));
    await refused(ask({ tool_choice: only("auto", "rain") }), "tool_choice");
}

/** With tools and a form, an answer is a call or has the form. A bias on its first letter decides which. */
async function toolsOrAForm(url, key, model) {
    const { completions } = connect(url, key).chat;
    const ask = { model, ...LONG, tools: [WEATHER], parallel_tool_calls: false, response_format: zodResponseFormat(City, "city") };
    const parse = first => completions.parse({ ...ask, temperature: 0, logit_bias: { [first.charCodeAt(0)]: 100 } });
    const called = (await parse("<")).choices[0];
    assert.equal(called.finish_reason, "tool_calls");
    assert(Place.safeParse(called.message.tool_calls[0].function.parsed_arguments).success);
    const said = (await parse("{")).choices[0].message;
    assert(isCity(said.parsed) && !said.tool_calls?.length);
}

async function forms(url, key, model) {
    const { completions } = connect(url, key).chat;
    const ask = { model, ...LONG, seed: 1, response_format: zodResponseFormat(City, "city") };
    assert(isCity((await completions.parse(ask)).choices[0].message.parsed));
    assert(isCity((await completions.stream(ask).finalChatCompletion()).choices[0].message.parsed));
}

/** Reasoning is apart from the answer, may be streamed and sent back, and comes before a form or a call. */
async function reasoning(url, key, model) {
    const ask = chat(url, key, model, FREE);
    const { message } = (await ask()).choices[0];
    assert(message.reasoning_content && message.content === "", JSON.stringify(message));
    assert.equal(await streamed(ask({ stream: true }), "reasoning_content"), message.reasoning_content);
    assert((await ask({ messages: [...MESSAGES, message, MORE] })).choices[0].message.reasoning_content);
    // The bias ends reasoning, which the token 259 closes, soon, but not always at once.
    const soon = chat(url, key, model, { ...LONG, logit_bias: { 259: 4 } });
    let thoughts = "";
    for (let seed = 0; seed < 4; seed++) {
        const said = (await soon({ seed, response_format: zodResponseFormat(City, "city") })).choices[0].message;
        const called = (await soon({ seed, ...ONE, tools: [WEATHER] })).choices[0].message;
        assert(isCity(JSON.parse(said.content)) && Place.safeParse(JSON.parse(called.tool_calls[0].function.arguments)).success);
        thoughts += said.reasoning_content ?? "";
    }
    assert(thoughts);
}

async function vectors(url, key, model) {
    const embed = fields => connect(url, key).embeddings.create({ model, input: ["Paris", "Rome"], ...fields });
    const [paris, rome] = (await embed()).data.map(item => item.embedding);
    assert.notDeepEqual(paris, rome);
    // The model was trained for shorter vectors, which are the beginnings of the others, but only of some lengths.
    const length = Math.hypot(...paris.slice(0, 8));
    const [{ embedding: short }] = (await embed({ dimensions: 8 })).data;
    assert.equal(short.length, 8);
    assert(short.every((value, index) => Math.abs(value - paris[index] / length) < 1e-6));
    await refused(embed({ dimensions: 2 }), "dimensions");
}

async function errors(url, key, model) {
    const ask = chat(url, key, model, FREE);
    await refused(ask({ temperature: -1 }), "temperature");
    await refused(ask({ stores: true }), "stores");
    await refused(ask({ messages: [{ ...MESSAGES[0], weight: 1 }] }));
    await assert.rejects(chat(url, "wrong", model, FREE)(), OpenAI.AuthenticationError);
}

async function responses(url, key, model) {
    const client = connect(url, key);
    const ask = { model, max_output_tokens: 200, temperature: 0 };
    const first = await client.responses.create({ ...ask, input: QUESTION, instructions: "Be brief." });
    const second = await client.responses.create({ ...ask, input: "Why?", previous_response_id: first.id });
    assert.equal(second.previous_response_id, first.id);
    assert.equal((await client.responses.retrieve(first.id)).id, first.id);
    const stream = client.responses.stream({ ...ask, input: QUESTION, text: { format: zodTextFormat(City, "city") } });
    assert(isCity((await stream.finalResponse()).output_parsed));
    const tools = [zodResponsesFunction({ name: "weather", parameters: Place })];
    const called = await client.responses.create({ ...ask, ...ONE, input: QUESTION, tools });
    const [call] = called.output.filter(item => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: weather(JSON.parse(call.arguments)) };
    const input = [{ role: "user", content: QUESTION }, ...called.output, result];
    assert((await client.responses.create({ ...ask, input, tools })).output.length);
}

const PARTS = [answers, usage, withoutEffect, nulls, histories, ofVllm, tools, allowedTools, toolsOrAForm, forms, vectors, errors];
await run(...PARTS, responses, [reasoning]);
