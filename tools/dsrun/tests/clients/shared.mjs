// What the scripts of JavaScript clients share: the question, a tool, a form of answers, and how a script is run.

import assert from "node:assert/strict";
import { z } from "zod";

export const QUESTION = "What is the weather in Paris?";

// Bounded, because the models of tests write anything that the form allows.
export const City = z.object({
    name: z.enum(["Paris", "Rome"]),
    people: z.number().int().min(0).max(1000),
    capital: z.boolean(),
});

export const Place = z.object({ city: z.enum(["Paris", "Rome"]), unit: z.enum(["C", "F"]) });

export const Time = z.object({ zone: z.number().int().min(-12).max(12) });

export function weather(place) {
    const { city, unit } = Place.parse(place);
    return `It rains in ${city}, at 11 ${unit}.`;
}

export function isCity(value) {
    return City.safeParse(value).success;
}

/** The text of a chat completion of OpenAI's client. */
export function content(answer) {
    return answer.choices[0].message.content;
}

/** A part of the deltas of a streamed one, together. */
export async function streamed(stream, part = "content") {
    let text = "";
    for await (const chunk of await stream) {
        text += chunk.choices[0]?.delta[part] ?? "";
    }
    return text;
}

/**
 * Calls each part with the arguments of the script: the server's URL, a key, and the model's name. If the names of parts follow, it
 * calls those instead; those in a list are called only by name, as they need another model.
 */
export async function run(...parts) {
    const [url, key, model, ...names] = process.argv.slice(2);
    assert(model, "usage: SCRIPT URL KEY MODEL [PART..]");
    const named = names.map(name => parts.flat().find(part => part.name === name));
    for (const part of names.length ? named : parts.filter(part => !Array.isArray(part))) {
        await part(url, key, model);
        console.log(`${part.name}: ok`);
    }
}
