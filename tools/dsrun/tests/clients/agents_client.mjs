// OpenAI's Agents SDK, over Responses (its default) and chat completions: tools, sessions, typed answers, handoffs, streams.
//
// usage: agents_client.mjs URL KEY MODEL [PART..]

import assert from "node:assert/strict";
import {
    Agent,
    MemorySession,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    run as runAgent,
    setTracingDisabled,
    tool,
} from "@openai/agents";
import OpenAI from "openai";
import { City, Place, QUESTION, isCity, run, weather } from "./shared.mjs";

function models(url, key, model) {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 120_000 });
    return [new OpenAIResponsesModel(client, model), new OpenAIChatCompletionsModel(client, model)];
}

/** An agent whose answers are the same every time. One call at a time: models of tests may go on to call until the limit. */
function agent(model, settings, limits) {
    const modelSettings = { maxTokens: 200, temperature: 0, parallelToolCalls: false, ...limits };
    return Agent.create({ name: "Guide", instructions: "Be brief.", model, modelSettings, ...settings });
}

async function streamed(agent, input, options) {
    const result = await runAgent(agent, input, { ...options, stream: true });
    const kinds = new Set();
    for await (const event of result) {
        kinds.add(event.type);
    }
    await result.completed;
    assert(kinds.has("raw_model_stream_event"), [...kinds].join());
    return result;
}

/** The SDK requires the first call, and lets the model decide from then on. */
async function conversation(url, key, model) {
    for (const served of models(url, key, model)) {
        const places = [];
        const execute = place => (places.push(place), weather(place));
        const tools = [tool({ name: "weather", description: "The weather of a city.", parameters: Place, execute })];
        const guide = agent(served, { tools }, { toolChoice: "required" });
        for (const go of [runAgent, streamed]) {
            const session = new MemorySession();
            const result = await go(guide, QUESTION, { session });
            const kinds = result.newItems.map(item => item.type);
            assert.deepEqual(kinds, ["tool_call_item", "tool_call_output_item", "message_output_item"]);
            const again = await go(guide, "And in Rome?", { session });
            assert(again.history.length > result.history.length);
            // A history may also be given by the caller, as the SDK keeps it.
            const history = [...result.history, { role: "user", content: "Why?" }];
            assert((await go(guide, history)).finalOutput);
        }
        assert.equal(places.length, 6);
    }
}

async function typed(url, key, model) {
    for (const served of models(url, key, model)) {
        for (const go of [runAgent, streamed]) {
            const { finalOutput } = await go(agent(served, { outputType: City }), QUESTION);
            assert(isCity(finalOutput), JSON.stringify(finalOutput));
        }
    }
}

/** An agent hands over to another, which is a tool call for the server. */
async function handedOver(url, key, model) {
    for (const served of models(url, key, model)) {
        const other = agent(served, { name: "Other", outputType: City });
        const first = agent(served, { handoffs: [other] }, { toolChoice: "required" });
        const result = await runAgent(first, QUESTION);
        assert.equal(result.lastAgent.name, "Other");
        assert(isCity(result.finalOutput), JSON.stringify(result.finalOutput));
    }
}

/** The server keeps the conversation. */
async function stored(url, key, model) {
    const guide = agent(models(url, key, model)[0]);
    const result = await runAgent(guide, QUESTION);
    const again = await runAgent(guide, "Why?", { previousResponseId: result.lastResponseId });
    const alone = await runAgent(guide, "Why?");
    const tokens = result => result.rawResponses[0].usage.inputTokens;
    assert(again.finalOutput && tokens(again) > tokens(alone), `${tokens(again)} ${tokens(alone)}`);
}

setTracingDisabled(true);
await run(conversation, typed, handedOver, stored);
