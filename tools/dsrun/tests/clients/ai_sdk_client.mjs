// Vercel's AI SDK with its providers for OpenAI-compatible servers, for OpenAI (Responses) and for Anthropic.
//
// usage: ai_sdk_client.mjs URL KEY MODEL

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { City, Place, QUESTION, isCity, run, weather } from "./shared.mjs";

const LIMITS = { maxOutputTokens: 1000, maxRetries: 0 };

function* models(url, key, model) {
    const name = "dsrun";
    yield createOpenAICompatible({ name, baseURL: `${url}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true })(model);
    yield createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).chat(model);
    yield createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).responses(model);
    yield createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(model);
}

function fail({ error }) {
    throw error;
}

async function answers(url, key, model) {
    for (const served of models(url, key, model)) {
        const ask = { model: served, ...LIMITS, maxOutputTokens: 30, temperature: 0, system: "Be brief.", prompt: QUESTION };
        const { text, usage } = await generateText(ask);
        assert(text && usage.outputTokens <= 30, text);
        const stream = streamText({ ...ask, onError: fail });
        let streamed = "";
        for await (const piece of stream.textStream) {
            streamed += piece;
        }
        assert.equal(streamed, text);
        assert.equal((await stream.usage).outputTokens, usage.outputTokens);
    }
}

async function tools(url, key, model) {
    const tools = { weather: tool({ description: "The weather of a city.", inputSchema: Place, strict: true, execute: weather }) };
    for (const served of models(url, key, model)) {
        const ask = { model: served, ...LIMITS, tools, stopWhen: stepCountIs(2) };
        for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
            const result = await generateText({ ...ask, prompt: QUESTION, toolChoice });
            assert.equal(result.steps.length, 2);
            assert(result.steps.every(step => step.toolResults.length > 0));
            // The history as the SDK keeps it.
            const messages = [{ role: "user", content: QUESTION }, ...result.response.messages, { role: "user", content: "And now?" }];
            const stream = streamText({ ...ask, messages, toolChoice, onError: fail });
            assert((await stream.steps).every(step => step.toolResults.length > 0));
        }
        await generateText({ ...ask, prompt: QUESTION, toolChoice: "auto" });
    }
}

async function forms(url, key, model) {
    for (const served of models(url, key, model)) {
        const ask = { model: served, ...LIMITS, prompt: QUESTION, output: Output.object({ schema: City }) };
        assert(isCity((await generateText(ask)).output));
        assert(isCity(await streamText({ ...ask, onError: fail }).output));
    }
}

async function vectors(url, key, model) {
    const provider = createOpenAICompatible({ name: "dsrun", baseURL: `${url}/v1`, apiKey: key });
    const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(model), values: ["Paris", "Rome"] });
    assert.equal(embeddings.length, 2);
}

await run(answers, tools, forms, vectors);
