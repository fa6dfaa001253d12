import tseslint from "typescript-eslint";

const markup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "srcdoc"];

export default tseslint.config(
  { ignores: ["node_modules"] },
  {
    files: ["src/**/*.ts"],
    extends: [...tseslint.configs.strict],
    rules: {
      "@typescript-eslint/no-non-null-assertion": "off", // cells of arrays, within their length
      eqeqeq: ["error", "always", { null: "ignore" }],
      // Text from a log must not become markup.
      "no-restricted-syntax": [
        "error",
        ...markup.map((name) => ({
          selector: `MemberExpression[property.name="${name.replace("document.", "")}"]`,
          message: `${name} takes markup: use textContent, or h() of dom.ts`,
        })),
      ],
    },
  },
);
