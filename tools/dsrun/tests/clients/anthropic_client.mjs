// Anthropic's JavaScript client: answers, streams, tools.
//
// usage: anthropic_client.mjs URL KEY MODEL

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { QUESTION, run, weather } from "./shared.mjs";

const MESSAGES = [{ role: "user", content: QUESTION }];
const TOOL = {
    name: "weather",
    description: "The weather of a city.",
    input_schema: {
        type: "object",
        properties: { city: { enum: ["Paris", "Rome"] }, unit: { enum: ["C", "F"] } },
        required: ["city", "unit"],
        additionalProperties: false,
    },
};

function connect(url, key) {
    return new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 120_000 });
}

async function answers(url, key, model) {
    const client = connect(url, key);
    const ask = { model, max_tokens: 30, temperature: 0, messages: MESSAGES };
    const answer = await client.messages.create(ask);
    assert(answer.content[0].text);
    const stream = client.messages.stream(ask);
    assert.equal(await stream.finalText(), answer.content[0].text);
    await assert.rejects(client.messages.create({ ...ask, temperature: -1 }), Anthropic.BadRequestError);
}

async function tools(url, key, model) {
    const client = connect(url, key);
    const ask = { model, max_tokens: 300, temperature: 0, tools: [TOOL] };
    const messages = [...MESSAGES];
    for (let turn = 0; turn < 2; turn++) {
        const answer = await client.messages.stream({ ...ask, messages, tool_choice: { type: "any" } }).finalMessage();
        assert.equal(answer.stop_reason, "tool_use");
        const uses = answer.content.filter(block => block.type === "tool_use");
        const content = uses.map(use => ({ type: "tool_result", tool_use_id: use.id, content: weather(use.input) }));
        messages.push({ role: "assistant", content: answer.content }, { role: "user", content });
    }
    assert((await client.messages.create({ ...ask, messages })).content.length);
}

await run(answers, tools);
