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

export function weather(place) {
    const { city, unit } = Place.parse(place);
    return `It rains in ${city}, at 11 ${unit}.`;
}

export function isCity(value) {
    return City.safeParse(value).success;
}

/** Calls each part with the arguments of the script: the server's URL, a key, and the model's name. */
export async function run(...parts) {
    const [url, key, model] = process.argv.slice(2);
    assert(model, "usage: SCRIPT URL KEY MODEL");
    for (const part of parts) {
        await part(url, key, model);
        console.log(`${part.name}: ok`);
    }
}
