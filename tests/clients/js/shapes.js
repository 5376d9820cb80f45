// What answers are asked to look like; the same as on the Python side.
import { z } from "zod";

export const River = z.object({
  name: z.enum(["Rhine", "Danube", "Seine", "Volga"]),
  length_km: z.number().int().min(100).max(9999),
  navigable: z.boolean(),
});
export const Weather = z.object({
  city: z.enum(["Paris", "Oslo", "Rome"]),
  unit: z.enum(["celsius", "fahrenheit"]),
});
export const riverQuestion = "Tell me about one river of Europe.";
export const weatherQuestion = "What is the weather in Oslo, in celsius?";
