// What the Python side passes on: where the system is, and what it must answer.
export const { PDSERVE_BASE_URL: baseURL, PDSERVE_KEY: apiKey, PDSERVE_MODEL: model } = process.env;
export const { PDSERVE_QUESTION: question, PDSERVE_GOLDEN: golden } = process.env;
export const maxTokens = Number(process.env.PDSERVE_MAX_TOKENS);
