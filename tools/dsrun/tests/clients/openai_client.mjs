// The official JavaScript client of OpenAI's API: answers, streams, tools, forms, vectors, Responses.
//
// usage: openai_client.mjs URL KEY MODEL

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat, zodFunction, zodResponsesFunction } from "openai/helpers/zod";
import { City, Place, QUESTION, isCity, run, weather } from "./shared.mjs";

const MESSAGES = [{ role: "user", content: QUESTION }];

function connect(url, key) {
    return new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
}

async function answers(url, key, model) {
    const client = connect(url, key);
    const ask = { model, messages: MESSAGES, max_completion_tokens: 20, temperature: 0 };
    const answer = await client.chat.completions.create(ask);
    const text = answer.choices[0].message.content;
    assert(text);
    let streamed = "";
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
        streamed += chunk.choices[0]?.delta.content ?? "";
    }
    assert.equal(streamed, text);
    const stream = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
    assert.equal(await stream.finalContent(), text);
    assert.equal((await stream.totalUsage()).completion_tokens, answer.usage.completion_tokens);
    const history = [...MESSAGES, answer.choices[0].message, { role: "user", content: "Why?" }];
    assert((await client.chat.completions.create({ ...ask, messages: history })).choices.length);
    const vectors = await client.embeddings.create({ model, input: ["Paris", "Rome"] });
    assert.equal(vectors.data.length, 2);
    await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), OpenAI.BadRequestError);
}

async function tools(url, key, model) {
    const client = connect(url, key);
    const calls = [];
    const tool = zodFunction({
        name: "weather",
        description: "The weather of a city.",
        parameters: Place,
        function: place => (calls.push(place), weather(place)),
    });
    const ask = { model, max_completion_tokens: 1000, temperature: 1, tools: [tool] };
    // The loop of the client: the named tool is called once, a required one until the limit.
    for (const tool_choice of [{ type: "function", function: { name: "weather" } }, "auto"]) {
        for (const stream of [false, true]) {
            const runner = client.chat.completions.runTools({ ...ask, messages: MESSAGES, tool_choice, stream }, { maxChatCompletions: 2 });
            await runner.done();
            assert(runner.messages.length > 1);
        }
    }
    assert(calls.length >= 2);
    const parsed = await client.chat.completions.parse({ ...ask, messages: MESSAGES, tool_choice: "required", parallel_tool_calls: false });
    const [message] = parsed.choices.map(choice => choice.message);
    assert(Place.safeParse(message.tool_calls[0].function.parsed_arguments).success);
    const back = [...MESSAGES, message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Rain" }];
    assert((await client.chat.completions.create({ ...ask, messages: back })).choices.length);
}

async function forms(url, key, model) {
    const client = connect(url, key);
    const ask = { model, messages: MESSAGES, max_completion_tokens: 200, response_format: zodResponseFormat(City, "city") };
    const parsed = await client.chat.completions.parse(ask);
    assert(isCity(parsed.choices[0].message.parsed));
    const final = await client.chat.completions.stream(ask).finalChatCompletion();
    assert(isCity(final.choices[0].message.parsed));
}

async function responses(url, key, model) {
    const client = connect(url, key);
    const ask = { model, max_output_tokens: 1000, temperature: 1 };
    const first = await client.responses.create({ ...ask, input: QUESTION, instructions: "Be brief." });
    assert.equal(first.status, "completed");
    const second = await client.responses.create({ ...ask, input: "Why?", previous_response_id: first.id });
    assert.equal(second.previous_response_id, first.id);
    assert.equal((await client.responses.retrieve(first.id)).id, first.id);
    const stream = client.responses.stream({ ...ask, input: QUESTION, text: { format: zodTextFormat(City, "city") } });
    const final = await stream.finalResponse();
    assert(isCity(final.output_parsed));
    const tool = zodResponsesFunction({ name: "weather", parameters: Place });
    const called = await client.responses.create({ ...ask, input: QUESTION, tools: [tool], tool_choice: "required", parallel_tool_calls: false });
    const calls = called.output.filter(item => item.type === "function_call");
    assert(calls.length);
    const results = calls.map(call => ({ type: "function_call_output", call_id: call.call_id, output: weather(JSON.parse(call.arguments)) }));
    const input = [{ role: "user", content: QUESTION }, ...called.output, ...results];
    assert((await client.responses.create({ ...ask, input, tools: [tool] })).output.length);
}

await run(answers, tools, forms, responses);
